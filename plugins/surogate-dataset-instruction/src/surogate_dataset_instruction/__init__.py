"""Surogate plugin: data sets of instructions and outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_dataset() -> bundles.DatasetFormat:
    """The format `instruction`."""
    from surogate_dataset_instruction.instruction import FORMAT

    return FORMAT
