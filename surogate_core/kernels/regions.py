"""Marks on the traced nodes of a block, which decide what is computed again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.fx.traceback as fx_traceback


def region(name: str) -> AbstractContextManager[Any]:
    """Marks the traced nodes of a part of a block, for the ``recompute_*`` switches."""
    return fx_traceback.annotate({"region": name})


def choice() -> AbstractContextManager[Any]:
    """Marks the traced nodes by which an op decides, such as a token's experts: they are never computed again."""
    return fx_traceback.annotate({"choice": True})
