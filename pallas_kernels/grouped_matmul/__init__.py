"""Grouped matrix products: each row meets the weights of its own group (MoE experts)."""
