"""benchmarks/gpu_offload.py: the bytes that it counts over the bus, and lengths of spans, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from gpu_offload import PLACES, _length, bus_bytes
from surogate_offload_host import surogate_offloader
from tiny_qwen3 import make_engine, tiny_config

CONFIG = tiny_config(num_hidden_layers=3, tie_word_embeddings=False)


def test_spans_count_once() -> None:
    assert _length([]) == 0
    assert _length([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


def test_bytes_over_the_bus_are_those_of_the_schedule() -> None:
    """bf16 weights of all pieces forward, of layers again backward; fp32 sums of all both ways, none in at first."""
    offloader = replace(surogate_offloader(), kinds=frozenset(PLACES["cpu_training"]))
    settings = {"dtype": torch.bfloat16, "master_dtype": torch.bfloat16, "update_on_cpu": True}
    engine = make_engine(CONFIG, offloader=offloader, **settings)
    total, _ = engine.parameters.counts()
    layers = sum(prod(s.shape) for piece in engine.plan.layers for s in piece.specs)
    weights, sums = 2 * (total + layers) / 1e9, 4 * total / 1e9
    assert bus_bytes(engine, first=False) == pytest.approx({"in": weights + sums, "out": sums})
    assert bus_bytes(engine, first=True) == pytest.approx({"in": weights, "out": sums})
    plain = make_engine(CONFIG, dtype=torch.bfloat16)
    assert bus_bytes(plain, first=False) == {"in": 0, "out": 0}
