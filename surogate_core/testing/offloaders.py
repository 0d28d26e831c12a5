"""Checks of offloaders: training with one has the bits of training without."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from surogate_core.bundles import OffloaderSpec, Store, TensorKind
from surogate_core.engine.engine import Engine
from surogate_core.testing import tiny
from surogate_core.testing.check import ensure

MICRO_BATCHES = 2
"""Of each step: only the second brings sums of gradients back."""
PLACES = frozenset({"device", "host", "disk"})


@contextmanager
def _offload_dir() -> Iterator[str]:
    """A directory for scratch files that, like a run's, need not be there yet; gone afterwards."""
    with tempfile.TemporaryDirectory() as parent:
        yield str(Path(parent) / "offload")


def _same(offloader: OffloaderSpec, *, lora: bool, recompute: bool) -> None:
    settings: dict[str, Any] = {"lora": tiny.lora() if lora else None, "recompute": recompute}
    with _offload_dir() as directory:
        made, plain = tiny.engine(offloader=offloader, offload_dir=directory, **settings), tiny.engine(**settings)
        # First, as a step's loss would not say that it is the sums; the first step adds to these.
        _same_micro_steps(made, plain)
        losses, expected = (tiny.train(e, 3, micro_batches=MICRO_BATCHES) for e in (made, plain))
        ensure(losses == expected, f"losses are {losses}, without offloading {expected}")
        tiny.ensure_same_bits(tiny.snapshot(made), tiny.snapshot(plain), "with offloading")
        stores: Mapping[TensorKind, Store] = {
            "weights": made.stores.weights,
            "residuals": made.stores.residuals,
            "gradients": made.stores.gradients,
        }
        for kind, store in stores.items():
            _states_its_bytes(kind, store, moved=offloader.moves(kind))


def _same_micro_steps(made: Engine, plain: Engine) -> None:
    for number, batch in enumerate(tiny.batches(0, MICRO_BATCHES), start=1):
        loss, expected = (engine.accumulate([batch]) for engine in (made, plain))
        ensure(loss == expected, f"the loss of micro-step {number} is {loss}, without offloading {expected}")
        sums, right = (engine.parameters.gradients_by_name() for engine in (made, plain))
        tiny.ensure_same_bits(sums, right, f"sums of gradients after micro-step {number}")


def _states_its_bytes(kind: TensorKind, store: Store, *, moved: bool) -> None:
    places = store.nbytes()
    ensure(places.keys() == PLACES, f"{kind}: nbytes() has the places {sorted(places)}, not {sorted(PLACES)}")
    for place, count in places.items():
        ensure(type(count) is int and count >= 0, f"{kind}: nbytes() of {place} is {count!r}, not a count of bytes")
    on_device = places["device"]
    ensure(not moved or on_device == 0, f"{kind}: after a step {on_device} bytes are on the device still")


def keeps_frozen_weights(offloader: OffloaderSpec) -> None:
    """Adapters over frozen weights: the same sums of gradients, losses and weights, bit for bit."""
    _same(offloader, lora=True, recompute=False)


def keeps_residuals(offloader: OffloaderSpec) -> None:
    """Full training, with residuals kept and with blocks computed again: the same sums, losses and weights."""
    for recompute in (False, True):
        _same(offloader, lora=False, recompute=recompute)


def allocates(offloader: OffloaderSpec) -> None:
    """Where it allocates: zeros, and what is written to either tensor is read from the other."""
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
