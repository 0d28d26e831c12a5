"""Surogate plugin: `surogate serve`, a server of the OpenAI API."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """`surogate serve`, and `surogate.serve` in Python."""
    return bundles.CommandSpec(
        name="serve",
        usage="serve MODEL [--adapter DIR …]",
        help="a server of the OpenAI API",
        main="surogate_command_serve.command:main",
        python="surogate_command_serve.serving:serve",
        rank=140,
        configured=True,
    )
