"""Bundles of reinforcement learning: environments, rollout engines, advantages, policy losses."""
