"""Offloaders: where tensors live between uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor


TensorKind = Literal["weights", "residuals", "gradients", "master", "optimizer"]
"""The kinds of tensor that a store can hold."""


class Store:
    """Where tensors of one kind live between their uses at block borders.

    Keys are the schedule's (``layer 3``). Prefetch starts a copy on a side stream; fetch
    returns tensors that the current stream may read at once; release ends their use.
    """

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Take the tensors over."""
        raise NotImplementedError

    def begin_pass(self) -> None:
        """A pass over the pieces begins: the tensors may have changed since the last one, and no key is in use, even if
        an error has ended that pass. By default nothing is done.
        """

    def prefetch(self, key: str) -> None:
        """Start the copies of the key's tensors to the compute device."""
        raise NotImplementedError

    def fetch(self, key: str) -> Sequence[Tensor]:
        """The key's tensors on the compute device."""
        raise NotImplementedError

    def release(self, key: str) -> None:
        """Free the copies on the compute device for reuse, and residuals completely."""
        raise NotImplementedError

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held now, by place."""
        raise NotImplementedError


class GradientStore(Store):
    """The fp32 gradient sums of trained tensors, on the compute device for one piece at a time.

    Additions to the fetched tensors between `fetch` and `release` are kept. A tied tensor is under two keys.
    """

    def begin(self, *, first: bool, last: bool) -> None:
        """A micro-step begins. If `first`, all sums count as zeros, whatever their contents. `last`: whether the update
        follows it, which reads the sums.
        """
        raise NotImplementedError

    def written(self, key: str) -> Sequence[bool]:
        """For each of the key's tensors, whether the backward writes it instead of adding to it: its contents do not
        count. Empty, the default, if all are added to.
        """
        return ()

    def finish(self) -> None:
        """A micro-step ends: later work of the current stream finds the sums in their own memory."""
        raise NotImplementedError


class Stores:
    """Where an offloader puts tensors in one run, which `OffloaderSpec.build` returns."""

    def store(self, kind: TensorKind) -> Store:
        """The store of weights, residuals or gradients (a `GradientStore`), which are copied as blocks run."""
        raise NotImplementedError

    def allocate(self, kind: TensorKind, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same zeroed [elements] twice, as a tensor of the compute device and as one of the CPU.

        For masters, gradients and optimizer state, which the kernels of the optimizer step read and write in place, and
        for trained weights.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloaderSpec:
    """A place for some kinds of tensor."""

    name: str
    """The value of `offload`."""
    kinds: frozenset[TensorKind]
    """The kinds of tensor that it places."""
    place: Literal["device", "host", "disk"]
    """Where it places them; for the plan's table."""
    build: Callable[[Any, str, torch.device], Stores]
    """(options, directory for scratch files, compute device) → the stores of a run. Allocates nothing yet."""
    allocates: bool = False
    """Whether the stores have `allocate`, which masters, gradients and optimizer state need."""
    addressable: bool = True
    """Whether kernels of a GPU can access the tensors of `allocate`, and a CUDA graph can capture all work of a store.
    If not, both tensors of `allocate` are the CPU's, and the CPU runs the optimizer step.
    """
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if it places kinds that need `allocate` without having it."""
        flat = self.kinds - {"weights", "residuals"}
        if flat and self.place != "device" and not self.allocates:
            raise ValueError(f"offloader {self.name!r} places {', '.join(sorted(flat))} without `allocates`")

    def moves(self, kind: TensorKind) -> bool:
        """Whether tensors of the kind are kept elsewhere than on the device."""
        return self.place != "device" and kind in self.kinds
