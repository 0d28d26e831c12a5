"""Surogate plugin: `surogate plan`, whether a run fits, how fast it is and how long it takes."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """The command."""
    return bundles.CommandSpec(
        name="plan",
        usage="plan [TASK] [FILE.yaml] [KEY=VALUE …]",
        help="will it fit, how fast, how long; nothing is trained",
        main="surogate_command_plan.command:main",
        rank=340,
        example="plan model=Qwen/Qwen3-0.6B datasets=my.jsonl",
        configured=True,
    )
