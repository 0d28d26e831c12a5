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

ELSEWHERE = {
    "num_nodes": "launcher=ray launcher.num_nodes=N; without launcher it is a word of `surogate plan` only",
    "gpus_per_node": "launcher=ray launcher.gpus_per_node=M; without launcher it is a word of `surogate plan` only",
    "interconnect": "leave it: it is a word of `surogate plan` only",
    "tokens_per_second": "leave it: it is a word of `surogate plan` only",
}
"""Word of one command → what to write instead."""

MESSAGE = "not available in this version."
