"""Verify a tree and write the state after every node: the baseline to compare with."""
