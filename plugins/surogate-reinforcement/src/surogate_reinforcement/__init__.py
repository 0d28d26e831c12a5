"""What plugins for reinforcement learning share: processes of environments, and terms of policy losses."""
