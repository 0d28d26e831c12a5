"""Surogate plugin: the commands merge and export."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> list[bundles.CommandSpec]:
    """`surogate merge` and `surogate export`, and what Python has of them."""
    return [
        bundles.CommandSpec(
            name="merge",
            usage="merge [RUN] [--output DIR]",
            help="fold a LoRA adapter into its base model; RUN is the latest by default",
            main="surogate_command_export.merge_command:main",
            python="surogate_command_export.python:merge",
            rank=300,
        ),
        bundles.CommandSpec(
            name="export",
            usage="export [RUN] --to hub://USER/NAME\nexport [MODEL] --to FILE.gguf",
            help="upload the result to the Hugging Face hub, or copy it to a directory\n"
            "write one file for llama.cpp and Ollama",
            main="surogate_command_export.export_command:main",
            python="surogate_command_export.python:export",
            rank=310,
            configured=True,
        ),
    ]
