"""Refuses a custom op that does something its schema does not say: tracing and reordering rely on the schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from surogate_testing.check import ensure

_TORCH = frozenset({"aten", "prim", "prims", "rngprims", "inductor", "profiler", "quantized", "_quantized", "mkldnn"})
"""Namespaces of torch's own ops."""


class HonestOps(TorchDispatchMode):
    """Inside it, a custom op that writes to memory that its schema does not declare mutated raises an `AssertionError`.

    The whole storage of every argument is compared, so that writes beside a view are seen. A result in the memory of an
    argument is refused too. `seen` has the names of the ops that were called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the op, and compare its arguments with copies."""
        kwargs = kwargs or {}
        if func.namespace in _TORCH:
            return func(*args, **kwargs)
        name = func.name()
        self.seen.add(name)
        given = list(_tensors(func, args, kwargs))
        before: dict[int, Tensor] = {}
        for _, tensor in given:
            if _address(tensor) not in before:
                before[_address(tensor)] = _storage(tensor).clone()
        results = func(*args, **kwargs)
        for argument, tensor in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                _same_place(tensor, before[_address(tensor)]).copy_(tensor)
        for argument, tensor in given:
            untouched = torch.equal(_storage(tensor), before[_address(tensor)])
            ensure(
                untouched, f"{name} writes to memory of its argument {argument.name}, and its schema does not say so"
            )
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.untyped_storage().nbytes():
                ensure(_address(result) not in before, f"{name} returns memory of an argument")
        return results


def _tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """(argument of the schema, tensor) of all tensors that have memory."""
    arguments = func._schema.arguments
    values = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
    for argument in arguments:
        for value in tree_leaves(values.get(argument.name)):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes():
                yield argument, value


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storage(tensor: Tensor) -> Tensor:
    """All bytes of its storage, [bytes] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _same_place(tensor: Tensor, storage: Tensor) -> Tensor:
    """The tensor's place in another storage."""
    place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return place.set_(storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
