"""Surogate plugin: the command env."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """`surogate env`."""
    return bundles.CommandSpec(
        name="env",
        usage="env list|new|problems|check|eval",
        help="environments of reinforcement learning: problems, rewards of a model",
        main="surogate_command_env.command:main",
        rank=130,
        configured=True,
    )
