"""Typed schema, Hydra composition, and validation that reports every mistake at once."""
