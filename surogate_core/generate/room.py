"""How many sequences a device has room for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable

from surogate_core.bundles.handed import ModelWeights, whole
from surogate_core.engine.device_memory import free_memory
from surogate_core.errors import MachineError
from surogate_core.files.atomic import human_bytes
from surogate_core.generate.cache import Cache, mixers_of
from surogate_core.generate.decoding import working_bytes
from surogate_core.generate.sequences import SEGMENT
from surogate_core.generate.weights import Weights

SHARE = 0.9
"""Share of the free memory that the caches may take."""


def fitting_slots(weights: ModelWeights, context: int, wanted: int, *, least: int = 1, fix: str) -> int:
    """The slots of a context that fit into the free memory (`needed_bytes`), at most `wanted`.

    Raises `MachineError` with `fix` if fewer than `least` fit.
    """
    room, needed = free_memory(weights.device), needed_bytes(weights, context)
    budget = math.inf if room is None else SHARE * room
    fitting = bisect_right(range(1, wanted + 1), budget, key=needed)
    if fitting < least:
        raise MachineError(
            f"The keys and values of {least} sequences of {context:,} tokens need {human_bytes(needed(least))}, and "
            f"{human_bytes(int(room or 0))} are free. Fix: {fix}."
        )
    return fitting


def needed_bytes(given: ModelWeights, context: int) -> Callable[[int], int]:
    """From the number of slots, what an engine allocates: keys and values, and on a GPU working memory."""
    weights = whole(Weights, given)
    context, mixers = -(-context // SEGMENT) * SEGMENT, mixers_of(weights)
    one = Cache.slot_bytes(mixers, context, weights.parameters.dtype)
    on_gpu = weights.plan.assembly.settings.device.type == "cuda"
    return lambda slots: one * (slots + 1) + (working_bytes(weights, mixers, slots, context) if on_gpu else 0)
