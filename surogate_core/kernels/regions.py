"""Marks on the traced nodes of a block, which decide what is computed again."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.fx.traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def region(name: str) -> AbstractContextManager[Any]:
    """Marks the traced nodes of a part of a block, for the ``recompute_*`` switches."""
    return _marked(region=name)


def choice() -> AbstractContextManager[Any]:
    """Marks the traced nodes by which an op decides, such as a token's experts: they are never computed again."""
    return _marked(choice=True)


def again() -> AbstractContextManager[Any]:
    """Marks traced nodes whose results the backward never keeps, and computes again at every level of recompute."""
    return _marked(again=True)


def _marked(**marks: Any) -> AbstractContextManager[Any]:
    # Outside of a trace nothing reads marks, which torch keeps in one place for all threads of a process.
    return nullcontext() if get_proxy_mode() is None else fx_traceback.annotate(marks)
