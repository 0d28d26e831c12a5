"""Checks of offloaders: training with one has the bits of training without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import bundles
from surogate_core.service.engine import Engine
from surogate_testing import tiny
from surogate_testing.check import ensure

MICRO_BATCHES = 2
"""Micro-steps of each step; only the second one reads gradient sums back."""
PLACES = frozenset({"device", "host", "disk"})


@contextmanager
def _offload_dir() -> Iterator[str]:
    """A directory for scratch files that, like a run's, need not exist yet; it is deleted afterwards."""
    with tempfile.TemporaryDirectory() as parent:
        yield str(Path(parent) / "offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    """What two trainings that must be equal have in common."""

    micro_steps: Sequence[tuple[float, Mapping[str, Tensor]]]
    """The loss of each micro-step and the sums of gradients after it, by HF name, before the first update."""
    losses: list[float]
    """The loss of each step after that."""
    state: Mapping[str, Tensor]
    """Everything that a checkpoint keeps, after the last step."""


def _trained(engine: Engine) -> _Training:
    # The micro-steps come first, as a step's loss would not say that it is the sums; the first step adds to these.
    micro_steps = []
    for batch in tiny.batches(0, MICRO_BATCHES):
        loss = engine.accumulate([batch])
        sums = {name: tensor.clone() for name, tensor in engine.parameters.gradients_by_name().items()}
        micro_steps.append((loss, sums))
    losses = tiny.train(engine, 3, micro_batches=MICRO_BATCHES)
    return _Training(micro_steps=micro_steps, losses=losses, state=tiny.snapshot(engine))


@cache
def _plain(*, lora: bool, recompute: bool) -> _Training:
    """The training without offloading, which all offloaders are compared with."""
    return _trained(tiny.engine(lora=tiny.lora() if lora else None, recompute=recompute))


def _same(offloader: bundles.OffloaderSpec, *, lora: bool, recompute: bool) -> None:
    with _offload_dir() as directory:
        settings: dict[str, Any] = {"lora": tiny.lora() if lora else None, "recompute": recompute}
        made = tiny.engine(offloader=offloader, offload_dir=directory, **settings)
        found, expected = _trained(made), _plain(lora=lora, recompute=recompute)
        for number, ((loss, sums), (right, right_sums)) in enumerate(
            zip(found.micro_steps, expected.micro_steps, strict=True), start=1
        ):
            ensure(loss == right, f"the loss of micro-step {number} is {loss}, without offloading {right}")
            tiny.ensure_same_bits(sums, right_sums, f"sums of gradients after micro-step {number}")
        right_losses = expected.losses
        ensure(found.losses == right_losses, f"losses are {found.losses}, without offloading {right_losses}")
        tiny.ensure_same_bits(found.state, expected.state, "with offloading")
        stores: Mapping[bundles.TensorKind, bundles.Store] = {
            "weights": made.stores.weights,
            "residuals": made.stores.residuals,
            "gradients": made.stores.gradients,
        }
        for kind, store in stores.items():
            _states_its_bytes(kind, store, moved=offloader.moves(kind))


def _states_its_bytes(kind: bundles.TensorKind, store: bundles.Store, *, moved: bool) -> None:
    places = store.nbytes()
    ensure(places.keys() == PLACES, f"{kind}: nbytes() has the places {sorted(places)}, not {sorted(PLACES)}")
    for place, count in places.items():
        ensure(type(count) is int and count >= 0, f"{kind}: nbytes() of {place} is {count!r}, not a count of bytes")
    on_device = places["device"]
    ensure(not moved or on_device == 0, f"{kind}: after a step {on_device} bytes are on the device still")


def keeps_frozen_weights(offloader: bundles.OffloaderSpec) -> None:
    """Adapters over frozen weights: the same sums of gradients, losses and weights, bit for bit."""
    _same(offloader, lora=True, recompute=False)


def keeps_residuals(offloader: bundles.OffloaderSpec) -> None:
    """Full training, with residuals kept and with blocks computed again: the same sums, losses and weights."""
    for recompute in (False, True):
        _same(offloader, lora=False, recompute=recompute)


def allocates(offloader: bundles.OffloaderSpec) -> None:
    """If it allocates: the memory is zero, and a value written to either tensor is read from the other."""
    if not offloader.allocates:
        return
    with _offload_dir() as directory:
        stores = offloader.build(offloader.options(), directory, tiny.CPU)
        for kind in sorted(offloader.kinds - {"residuals"}):
            for dtype in (torch.float32, torch.bfloat16, torch.uint8):
                made, on_cpu = stores.allocate(kind, 1000, dtype)
                for tensor in (made, on_cpu):
                    right = tensor.shape == (1000,) and tensor.dtype == dtype
                    ensure(right, f"{kind}: {tensor.shape} of {tensor.dtype}")
                    ensure(not tensor.any(), f"{kind}: not zeros")
                made[3], on_cpu[5] = 7, 9
                ensure(bool(on_cpu[3] == 7 and made[5] == 9), f"{kind}: the two tensors are not one memory")


CHECKS = (keeps_frozen_weights, keeps_residuals, allocates)
