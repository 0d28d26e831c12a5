"""Surogate plugin: `surogate generate`, texts continued by a model."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """`surogate generate`, and `surogate.generate` in Python."""
    return bundles.CommandSpec(
        name="generate",
        usage="generate MODEL --prompt TEXT",
        help="continue a text; MODEL is a directory, a run, an adapter or a hub id",
        main="surogate_command_generate.command:main",
        python="surogate_command_generate.python:generate",
        rank=100,
        configured=True,
    )
