"""Figures of trained models: held-out loss, tasks, numerics."""
