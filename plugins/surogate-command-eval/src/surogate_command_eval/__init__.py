"""Surogate plugin: the command eval."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """`surogate eval`, and `surogate.evaluate` in Python."""
    return bundles.CommandSpec(
        name="eval",
        usage="eval MODEL [MODEL …]",
        help="held-out loss, or accuracy on benchmarks; several models are compared",
        main="surogate_command_eval.command:main",
        python="surogate_command_eval.python:evaluate",
        rank=120,
        configured=True,
    )
