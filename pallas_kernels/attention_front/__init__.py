"""From projected rows to what attention takes: norms, rotary embedding, heads."""
