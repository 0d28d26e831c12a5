"""Surogate plugin: metrics.jsonl, one event a line."""
