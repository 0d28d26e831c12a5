"""The necessary FLOPs of a step and the rate of a product on this device, which together give SOL.

The count includes the products of the base weights and attention. It excludes adapters, recomputation, norms and
padding: a run that does less of them is faster at the same count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.dsl.declare import Model

ATTENTION_PASSES = 3.5
"""Cost of attention's forward and backward together, in forwards (arXiv 2307.08691, section 4.1)."""

GEMM_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows, columns and inner size of the timed product, by the type of device."""

GEMM_REPEATS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs of training one model."""

    products_per_token: float
    """Forward, input gradients, and weight gradients where weights are trained; head included."""
    attention_per_pair: float
    """FLOPs for one token and one token that it attends to, in all layers, forward and backward."""

    @classmethod
    def of(cls, model: Model, *, frozen: bool) -> Work:
        """`frozen`: whether the base is frozen. Without `num_attention_heads` no attention is counted."""
        weights, attending = model.vocab_size * model.width, 0
        for _, block in model.blocks(0):
            slots = block.linear_slots(None)
            weights += sum(slot.inputs * slot.outputs for slot in slots)
            attending += any(slot.group == "qkv" for slot in slots)
        heads = int(model.config.get("num_attention_heads") or 0)
        features = int(model.config.get("head_dim") or (model.width // heads if heads else 0))
        return cls(
            products_per_token=float(weights * (4 if frozen else 6)),
            attention_per_pair=ATTENTION_PASSES * 4 * heads * features * attending,
        )

    def per_token(self, pairs: float) -> float:
        """FLOPs of a token that attends to `pairs` tokens on average, itself among them."""
        return self.products_per_token + self.attention_per_pair * pairs

    def step(self, batches: Sequence[MicroBatch]) -> float:
        """FLOPs of an optimizer step over these micro-batches, without padding."""
        tokens = sum(b.tokens for b in batches)
        pairs = sum(b.tokens * mean_pairs(b.positions) if b.pairs is None else b.pairs for b in batches)
        return self.products_per_token * tokens + self.attention_per_pair * pairs


def mean_pairs(positions_N: Tensor) -> float:
    """Mean number of tokens that a token attends to; positions restart in each document, and padding is a document
    too.
    """
    return float(positions_N.double().mean()) + 1.0


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
