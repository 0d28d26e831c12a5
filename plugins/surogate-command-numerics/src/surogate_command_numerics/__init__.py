"""Surogate plugin: the command numerics."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """`surogate numerics`."""
    return bundles.CommandSpec(
        name="numerics",
        usage="numerics [KEY=VALUE …] [--recipes A,B]",
        help="the same training under each precision recipe, compared",
        main="surogate_command_numerics.command:main",
        rank=330,
        configured=True,
    )
