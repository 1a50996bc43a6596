"""Kernels and their references: arrays in, arrays out; no trees, models or files."""
