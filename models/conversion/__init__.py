"""Hugging Face folders to orbax checkpoints and back, bit for bit."""
