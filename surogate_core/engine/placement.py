"""The kinds of tensor that an offloader moves in a run, and their allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from surogate_core.bundles import FLAT_ALIGNMENT, GradientStore, OffloaderSpec, Store, Stores, TensorKind
from surogate_core.engine.stores import NO_OFFLOAD, DeviceGradients, DeviceStore, DeviceStores
from surogate_core.errors import PluginError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An offloader, restricted to the kinds that the run moves, on one compute device."""

    offloader: OffloaderSpec
    stores: Stores | None
    """The stores that the offloader built; None if nothing is allocated, as for a prediction."""
    device: torch.device
    updates_on_cpu: bool = False
    """Whether the CPU runs the optimizer step, so that all masters and gradients are in its memory."""

    experts_apart: bool = False
    """Whether the offloader's store of weights has the frozen experts, and the device the other weights."""

    @classmethod
    def on(cls, device: torch.device) -> Placement:
        """Everything stays on the device."""
        return cls(offloader=NO_OFFLOAD, stores=DeviceStores(), device=device)

    def moves(self, kind: TensorKind) -> bool:
        """Whether tensors of the kind are kept elsewhere than on the device."""
        return self.offloader.moves(kind)

    def streams_trained(self, *, masters: bool) -> bool:
        """Whether trained weights are copied to the device block by block, like frozen ones.

        `masters`: whether blocks compute with the masters themselves, which then have the model's dtype.
        """
        return self.offloader.allocates and self.moves("weights") and (self.moves("master") or not masters)

    def store(self, kind: TensorKind) -> Store:
        """The store of a kind."""
        return self.moved(kind) if kind in self.offloader.kinds else DeviceStore(kind)

    def moved(self, kind: TensorKind) -> Store:
        """The offloader's store of a kind."""
        assert self.stores is not None
        store = self.stores.store(kind)
        if not isinstance(store, Store):
            raise PluginError(
                f"offload={self.offloader.name}: its store of {kind} is no bundles.Store (docs/hooks.md). "
                f"Fix: derive it from that class."
            )
        return store

    def gradients(self, written: Collection[str] = ()) -> GradientStore:
        """The store of gradient sums. `written`: as of `DeviceGradients`, the other stores decide by themselves."""
        if not self.moves("gradients"):
            return DeviceGradients(written)
        store = self.moved("gradients")
        if not isinstance(store, GradientStore):
            raise UserError(
                f"offload={self.offloader.name}: it moves gradients, but its store of them is no bundles.GradientStore "
                f"(docs/hooks.md). Fix: set offload_grads=false, or choose an offloader that has one."
            )
        return store

    def zeros(self, kind: TensorKind, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[elements] zeros in the kind's place, as the device's tensor and as the CPU's; on the device both are the
        same.
        """
        if self.moves(kind) and elements and self.device.type != "meta":
            assert self.stores is not None
            return self.stores.allocate(kind, elements, dtype)
        plain = torch.zeros(elements, dtype=dtype, device=self.device)
        return plain, plain

    def trained_weights(self, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`zeros` for the copies of masters that blocks compute with."""
        return (self if self.streams_trained(masters=False) else Placement.on(self.device)).zeros(
            "weights", elements, dtype
        )

    @contextmanager
    def allocating(self, kind: TensorKind) -> Iterator[None]:
        """Inside, `torch.zeros`, `torch.empty` and similar functions allocate in the kind's place."""
        if not self.moves(kind):
            yield
            return
        # If a GPU cannot address the memory, the optimizer runs on the CPU and allocates CPU tensors.
        device = self.device if self.offloader.addressable else torch.device("cpu")
        with _Allocating(lambda elements, dtype: self.zeros(kind, elements, dtype)[0], device):
            yield


_aten = torch.ops.aten
_FILLED: Mapping[Any, Callable[[tuple[Any, ...]], Any]] = {
    _aten.empty.memory_format: lambda arguments: 0,
    _aten.empty_like.default: lambda arguments: 0,
    _aten.new_empty.default: lambda arguments: 0,
    _aten.zeros.default: lambda arguments: 0,
    _aten.zeros_like.default: lambda arguments: 0,
    _aten.new_zeros.default: lambda arguments: 0,
    _aten.full.default: lambda arguments: arguments[1],
    _aten.full_like.default: lambda arguments: arguments[1],
    _aten.new_full.default: lambda arguments: arguments[2],
}
"""Ops that make a tensor → the value of its elements, from the op's arguments."""


class _Allocating(TorchDispatchMode):
    """Allocates an optimizer's state in its place, without code in the optimizer.

    Results of other ops, and tensors under `FLAT_ALIGNMENT` elements, stay on the device.
    """

    def __init__(self, zeros: Callable[[int, torch.dtype], Tensor], device: torch.device):
        super().__init__()
        self._zeros, self._device = zeros, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _FILLED:
            return func(*args, **kwargs)
        shape = func(*tree_map_only(Tensor, _on_meta, args), **{**kwargs, "device": torch.device("meta")})
        given = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
        wanted = torch.device(kwargs.get("device") or given)
        elements = math.prod(shape.shape)
        if wanted.type != self._device.type or elements < FLAT_ALIGNMENT or not shape.is_contiguous():
            return func(*args, **kwargs)
        made = self._zeros(elements, shape.dtype).view(shape.shape)
        value = _FILLED[func](args)
        return made.fill_(value) if value else made


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")
