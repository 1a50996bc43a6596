"""Verify all nodes of a tree in one pass over the state (reference: treewy_jax.wy)."""
