"""Append to a history: the records of an accepted path, behind those of a row."""
