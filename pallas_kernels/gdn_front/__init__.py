"""From raw projected rows to what the recurrence takes: conv, norms and gates."""
