"""Surogate plugin: `surogate chat`, a chat in the terminal."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """`surogate chat`."""
    return bundles.CommandSpec(
        name="chat",
        usage="chat MODEL [MODEL …]",
        help="a chat in the terminal",
        main="surogate_command_chat.command:main",
        rank=110,
        configured=True,
    )
