"""Environments of reinforcement learning: worker processes, random draws, and what several of them share."""
