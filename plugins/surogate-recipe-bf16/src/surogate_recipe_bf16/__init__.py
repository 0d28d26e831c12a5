"""Surogate plugin: the bf16 precision recipe."""
