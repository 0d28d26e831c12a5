"""Surogate plugin: conversation and text data sets, and the embedded example."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

SUROGATE_API = ">=2,<3"

EMBEDDED_TOKENIZER = "pkg://surogate_dataset_chat/embedded/tokenizer"
"""The tokenizer that a run uses when its model has none of its own."""


@hookimpl
def surogate_config_path() -> str:
    """Where this plugin's config groups are."""
    return "pkg://surogate_dataset_chat.conf"


@hookimpl
def surogate_dataset() -> list[bundles.DatasetFormat]:
    """The formats `conversation` and `text`."""
    from surogate_dataset_chat import conversation, text

    return [conversation.FORMAT, text.FORMAT]
