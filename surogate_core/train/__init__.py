"""The training loop: events, checkpoints, schedules, export."""
