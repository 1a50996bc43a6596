"""Decode one token of the gated delta rule; the state is updated in place."""
