"""Attention over a prefix cache and a tree of new nodes, in one softmax."""
