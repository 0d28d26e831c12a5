"""Refuses code that a CUDA graph cannot capture: code that waits for a tensor's value on the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import surogate_core

_METHODS = frozenset(
    {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__", "__complex__"}
)
_OPS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::is_nonzero",
        "aten::item",
        "aten::masked_select",
        "aten::nonzero",
        "aten::repeat_interleave.Tensor",
        "aten::unique_consecutive",
        "aten::_unique",
        "aten::_unique2",
    }
)
_INDEXING = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})

_HERE = Path(__file__)
_CORE = Path(surogate_core.__file__).parent
_TORCH = Path(torch.__file__).parent


class _HostRead(BaseException):
    """Raised when a value is read; not an `Exception`, so that the code under test does not catch it."""


def _of_the_core() -> bool:
    """Whether an op of the core reads the value: these ops read values only on a CPU, where nothing waits."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not (_TORCH in file.parents or file == _HERE):
            return _CORE in file.parents
        frame = frame.f_back
    return False


class _Methods(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS and args and isinstance(args[0], Tensor) and not _of_the_core():
            raise _HostRead(name)
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        overload = f"{name}.{func._overloadname}"
        by_mask = name in _INDEXING and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (name in _OPS or overload in _OPS or by_mask) and not _of_the_core():
            raise _HostRead(f"{name} with a mask" if by_mask else name)
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads(what: str) -> Iterator[None]:
    """Raise `AssertionError` if a tensor's value is read on the host; the message begins with `what`, e.g. a method.

    Reads inside C code are not detected, and ops of the core are trusted.
    """
    try:
        with _Methods(), _Ops():
            yield
    except _HostRead as read:
        raise AssertionError(
            f"{what} reads a tensor's value on the host ({read}): a CUDA graph keeps the value of its capture"
        ).with_traceback(read.__traceback__) from read
