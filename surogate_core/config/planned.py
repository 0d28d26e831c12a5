"""What the plan names and this version does not have yet, so that the message can say so.

A name leaves this page when it is built; a test keeps it apart from the schema and the catalogue.
"""

from __future__ import annotations

KEYS = frozenset(
    """
    model_type
    ep_size ep_load_balance_threshold ep_plan_refresh_interval
    debug_time_breakdown debug_memory_breakdown
    """.split()  # noqa: SIM905
)
"""Flat keys."""

NAMES: frozenset[tuple[str, str]] = frozenset()
"""(group or kind, name)."""

COMMANDS: frozenset[str] = frozenset()
"""Sub-commands of `surogate`."""

ELSEWHERE = {"distributed": "launcher=ray launcher.num_nodes=N launcher.gpus_per_node=M launcher.ray_address=ADDRESS"}
"""Key of the plan → what to write instead, where it became something else."""

MESSAGE = "not available in this version."
