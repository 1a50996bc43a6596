"""TreeWY in JAX: verify a tree of drafted tokens while holding one state."""
