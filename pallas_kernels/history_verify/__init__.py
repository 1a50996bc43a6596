"""Verify a tree behind a short history of committed tokens that the state lacks."""
