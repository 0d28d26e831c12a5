"""Surogate plugin: data sets of chosen and rejected answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_dataset() -> bundles.DatasetFormat:
    """The format `preference`."""
    from surogate_dataset_preference.preference import FORMAT

    return FORMAT
