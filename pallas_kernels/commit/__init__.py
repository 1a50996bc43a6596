"""Commit: the state after an accepted path, rebuilt from the records of verify."""
