"""Surogate plugin: the type of a data set, found from its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_dataset() -> bundles.DatasetFormat:
    """The format `auto`."""
    from surogate_dataset_auto.detect import FORMAT

    return FORMAT
