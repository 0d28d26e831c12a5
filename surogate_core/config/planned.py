"""What the plan names and this version does not have yet, so that the message can say so.

A name leaves this page when it is built; a test keeps it apart from the schema and the catalogue.
"""

from __future__ import annotations

KEYS = {
    "model_type": "remove it; the model's config.json names its family",
    "debug_time_breakdown": "remove it; `surogate.log` has the seconds of each part of the start",
    "debug_memory_breakdown": "remove it; `surogate plan` lists the memory of each kind of tensor",
}
"""Flat key → what to do without it."""

PLAN = "on the command line of `surogate plan`"
ELSEWHERE = {
    "num_nodes": f"launcher=ray launcher.num_nodes=N for a run, or num_nodes=N {PLAN}",
    "gpus_per_node": f"launcher=ray launcher.gpus_per_node=M for a run, or gpus_per_node=M {PLAN}",
    "interconnect": f"remove it, or write interconnect=… {PLAN}",
    "tokens_per_second": f"remove it, or write tokens_per_second=… {PLAN}",
}
"""Word of one command → what to write instead."""

MESSAGE = "not available in this version."
