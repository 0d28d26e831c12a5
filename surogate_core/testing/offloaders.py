"""Checks of offloaders: training with one has the bits of training without."""

from __future__ import annotations

from typing import Any

import torch

from surogate_core.bundles import Offloader
from surogate_core.testing import tiny
from surogate_core.testing.check import ensure


def _same(offloader: Offloader, *, lora: bool, recompute: bool) -> None:
    settings: dict[str, Any] = {"lora": tiny.adapters() if lora else None, "recompute": recompute}
    made, plain = tiny.engine(offloader=offloader, **settings), tiny.engine(**settings)
    losses, expected = tiny.train(made, 3), tiny.train(plain, 3)
    ensure(losses == expected, f"losses are {losses}, without offloading {expected}")
    tiny.ensure_same_bits(tiny.snapshot(made), tiny.snapshot(plain), "with offloading")
    for store in (made.weights, made.residuals):
        places = store.nbytes()
        ensure(set(places) <= {"device", "host", "disk"}, f"nbytes() has the places {sorted(places)}")


def keeps_frozen_weights(offloader: Offloader) -> None:
    """Adapters over frozen weights: the same losses and weights, bit for bit."""
    _same(offloader, lora=True, recompute=False)


def keeps_residuals(offloader: Offloader) -> None:
    """Full training, with residuals kept and with blocks computed again: the same losses and weights, bit for bit."""
    for recompute in (False, True):
        _same(offloader, lora=False, recompute=recompute)


def allocates(offloader: Offloader) -> None:
    """Where it allocates: zeros, and what is written to either tensor is read from the other."""
    if offloader.allocate is None:
        return
    for kind in sorted(offloader.kinds - {"residuals"}):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            made, on_cpu = offloader.allocate(kind, 1000, dtype, tiny.CPU, offloader.options())
            for tensor in (made, on_cpu):
                ensure(tensor.shape == (1000,) and tensor.dtype == dtype, f"{kind}: {tensor.shape} of {tensor.dtype}")
                ensure(not tensor.any(), f"{kind}: not zeros")
            made[3], on_cpu[5] = 7, 9
            ensure(bool(on_cpu[3] == 7 and made[5] == 9), f"{kind}: the two tensors are not one memory")


CHECKS = (keeps_frozen_weights, keeps_residuals, allocates)
