"""Surogate plugin: live console view."""
