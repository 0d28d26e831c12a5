"""The necessary FLOPs of a step and the rate of a product on this device, which together give MFU.

The count includes the products of the base weights and attention. It excludes adapters, recomputation, norms and
padding: a run that does less of them is faster at the same count.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from surogate_core.batch import BatchCounts, MicroBatch
from surogate_core.dsl.declare import Model
from surogate_core.dsl.mixers import KeyValues

ATTENTION_PASSES = 3.5
"""Cost of attention's forward and backward together, in forwards (arXiv 2307.08691, section 4.1)."""

GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows, columns and inner size of the timed product, by the type of device."""

GEMM_REPEATS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of training one model."""

    products_per_token: float
    """Forward, input gradients, and weight gradients where weights are trained; head and recurrences included."""
    attention_per_pair: float
    """FLOPs for one token and one token that it attends to, in all layers without a window, forward and backward."""
    windows: tuple[tuple[int, float], ...] = ()
    """(window, the same FLOPs) of the layers with one."""

    @classmethod
    def of(cls, model: Model, *, frozen: bool) -> ModelFlops:
        """`frozen`: whether the base is not trained."""
        products, recurrences, attention = model.vocab_size * model.width, 0, Counter[int]()
        for _, block in model.blocks(0):
            products += sum(s.inputs * s.outputs for s in block.linear_slots(None))
            products += sum(e.choices * e.inputs * e.outputs for e in block.expert_slots(None))
            for spec in block.mixer_specs():
                if isinstance(spec, KeyValues):
                    attention[spec.window] += spec.heads * (spec.keys + spec.values)
                else:
                    recurrences += spec.multiplications
        return cls(
            products_per_token=float(products * (4 if frozen else 6) + recurrences * 6),
            attention_per_pair=ATTENTION_PASSES * 2 * attention.pop(0, 0),
            windows=tuple((window, ATTENTION_PASSES * 2 * count) for window, count in attention.items()),
        )

    def attention(self, tokens: float, pairs: float) -> float:
        """FLOPs of attention. `pairs` counts a token and one that it attends to, in layers without a window. A window
        bounds the pairs of each token: an upper estimate, unless documents are much longer than it.
        """
        return self.attention_per_pair * pairs + sum(each * min(pairs, size * tokens) for size, each in self.windows)

    def per_token(self, pairs: float) -> float:
        """FLOPs of a token that attends to `pairs` tokens on average where there is no window, itself among them."""
        return self.products_per_token + self.attention(1, pairs)

    def step(self, batches: Sequence[MicroBatch | BatchCounts]) -> float:
        """FLOPs of an optimizer step over these micro-batches, without padding, on all ranks together."""
        counts = [b if isinstance(b, BatchCounts) else b.counts() for b in batches]
        tokens, pairs = sum(c.tokens for c in counts), sum(c.pairs for c in counts)
        return self.products_per_token * tokens + self.attention(tokens, pairs)


@cache
def gemm_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a square product of random values of this dtype, measured once per process.

    Takes the median of the repeats on a GPU, whose clock drops under load, and the minimum on a CPU, which other
    processes only slow down.
    """
    size = GEMM_SIZE.get(device.type, 1024)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    a @ b
    seconds = [_seconds(a, b) for _ in range(GEMM_REPEATS)]
    return 2 * float(size) ** 3 / (statistics.median(seconds) if device.type == "cuda" else min(seconds))


def _seconds(a: Tensor, b: Tensor) -> float:
    if a.device.type != "cuda":
        started = time.perf_counter()
        a @ b
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    a @ b
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
