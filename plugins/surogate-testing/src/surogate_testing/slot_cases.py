"""Checks of kernels for `slot_attention`, which writes into its arguments and has no gradient.

Shape suffixes as in `surogate_core.kernels.decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import bundles
from surogate_core.service.kernels import extensions, slot_attention
from surogate_testing.check import ensure
from surogate_testing.kernel_inputs import normal

REFERENCE: Callable[..., Tensor] = slot_attention
"""The op outside of a table of kernels."""
SLOTS, POSITIONS, PLACES = (2, 0, 3, 3), (0, 6, 19, 20), 24
"""Slots and positions of four rows, and places of a slot. The last of five slots takes rows that do not count."""
RING = 12
"""Places of a slot with a window."""
SETTINGS: Mapping[str, Any] = {"window": 5, "softcap": 1.5, "sinks": normal(4, seed=5)}
"""Extension → a value that changes the result."""


def settings_of(known: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Every combination of the extensions that a kernel knows; the first one is empty."""
    names = sorted(known & SETTINGS.keys())
    for count in range(len(names) + 1):
        for some in combinations(names, count):
            yield {name: SETTINGS[name] for name in some}


def ensure_slots_are_filled(kernel: bundles.Kernel, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    """Raise `AssertionError` unless a kernel of `slot_attention` gives what the reference does, and fills the slots."""
    missing = extensions["slot_attention"].keys() & kernel.knows - SETTINGS.keys()
    ensure(not missing, f"the kit has no inputs for {', '.join(sorted(missing))}")
    for settings in settings_of(kernel.knows):
        for places in (PLACES, RING) if "window" in settings else (PLACES,):
            given = _arguments(places)
            mine = [t.to(device, dtype) if t.is_floating_point() else t.to(device) for t in given]
            exact = [t.double() if t.is_floating_point() else t for t in mine]
            named = {n: v.to(device, dtype) if isinstance(v, Tensor) else v for n, v in settings.items()}
            if not kernel.takes(*mine, PLACES, 0.3, **named):
                continue
            found = kernel.function(*mine, PLACES, 0.3, **named).double()
            wide = {n: v.double() if isinstance(v, Tensor) else v for n, v in named.items()}
            wanted = REFERENCE(*exact, PLACES, 0.3, **wide)
            what = f"with {', '.join(sorted(settings))}" if settings else "without extensions"
            what += ", in a ring" if places == RING else ""
            ensure(found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
            error = float((found - wanted).abs().max() / wanted.abs().max())
            ensure(error <= bound, f"{what}: error {error:.1e}, more than {bound:.0e}")
            for name, cached, expected in zip(("keys", "values"), mine[3:5], exact[3:5], strict=True):
                ensure(torch.equal(cached[:-1].double(), expected[:-1]), f"{what}: the slots hold other {name}")


def _arguments(places: int) -> list[Tensor]:
    q, k, v = (normal(len(SLOTS), heads, 64, seed=heads) for heads in (4, 2, 2))
    keys, values = (normal(5, places, 2, 64, seed=seed) for seed in (7, 8))
    for row in (2, 3):  # as the op's contract has it for rows of one slot
        for cache, rows in ((keys, k), (values, v)):
            cache[SLOTS[row], POSITIONS[row] % places] = rows[row]
    return [q, k, v, keys, values, torch.tensor(SLOTS), torch.tensor(POSITIONS)]
