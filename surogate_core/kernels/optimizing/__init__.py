"""Ops of the optimizer step."""
