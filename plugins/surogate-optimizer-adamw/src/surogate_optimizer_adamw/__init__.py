"""Surogate plugin: AdamW with fp32 state."""
