"""The gated delta rule over a whole sequence, computed chunk by chunk."""
