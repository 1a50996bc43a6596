"""Grouped matrix products: each row meets its own group of weights (MoE experts)."""
