"""The programs of generation compile for every architecture, as they are launched; no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_testing.triton_programs import SHARED, check_compiled, empty, recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]
PROGRAMS = {"slot_attention", "slot_attention_sum", "choose_part", "choose_token", "token_bounds", "down_split"}


def attend(heads: int, kv_heads: int, features: int, dtype: torch.dtype, context: int, **named: Any) -> None:
    from surogate_kernels_triton import decoding

    q, k, v = (empty(8, h, features, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    cache, places = empty(9, context, kv_heads, features, dtype=dtype), empty(8, dtype=torch.int64)
    decoding._slot_attention(q, k, v, cache, cache, places, places, context, 0.1, **named)


def choose(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    from surogate_kernels_triton import sampling

    keys, temperature = empty(rows, 2, dtype=torch.int32), empty(rows, dtype=torch.float32)
    logits, lasts, top_k = empty(rows, vocabulary, dtype=dtype), keys[:, 0], empty(rows, dtype=torch.int64)
    for bounds in ((None, None), (temperature, lasts)):
        sampling._choose._init_fn(logits, temperature, keys, lasts, *bounds)
    sampling._bounds._init_fn(logits, temperature, top_k, temperature, temperature)


def adapt(rows: int, rank: int, slots: int, inputs: int) -> None:
    from surogate_native.adapters import down_few

    x, a, u = empty(rows, inputs + 128), empty(rank * slots, inputs), empty(rows, rank * slots)
    for copies in (False, True):
        down_few(x, a, u, x[:, inputs:], slots, copies=copies)
    down_few(x, a, u, u, slots, largest=True)


@pytest.mark.parametrize("capability", SHARED)
def test_every_program_compiles(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from surogate_kernels_triton import decoding, sampling

    large = capability // 10 in (9, 10)
    monkeypatch.setattr(decoding, "large", lambda device: large)
    monkeypatch.setattr(sampling, "exact", lambda device: True)
    with recorded(monkeypatch) as launches:
        for split in (False, True):
            monkeypatch.setattr(decoding, "splits", lambda device, pairs, chunks, split=split: split)
            for heads, kv_heads, features in (
                (16, 8, 128),
                (32, 8, 128),
                (9, 3, 64),
                (8, 8, 96),
                (32, 1, 128),
                (8, 4, 256),
                (8, 1, 512),
            ):
                attend(heads, kv_heads, features, torch.bfloat16, 2048)
            attend(16, 8, 64, torch.bfloat16, 2048, window=128, sinks=empty(16))
            attend(8, 4, 256, torch.bfloat16, 2048, window=512, softcap=50.0)
            attend(16, 8, 128, torch.float16, 32768)
            for features in (64, 128, 256):
                attend(16, 8, features, torch.float32, 2048)
        for vocabulary in (49152, 151936):
            choose(8, vocabulary, torch.bfloat16)
            choose(8, vocabulary, torch.float32)
        for rows, (rank, slots) in product((128, 256), ((16, 3), (32, 1), (64, 2), (128, 1))):
            adapt(rows, rank, slots, 4096)
    assert {launch.program.__name__ for launch in launches} == PROGRAMS
    check_compiled(launches, capability, tmp_path / "program.cubin")


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("rank", [16, 64, 128])
def test_adapters_of_every_rank_fit_a_block(capability: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training: many rows, with dropout and without."""
    from surogate_native import adapters

    monkeypatch.setattr(adapters, "large", lambda device: capability // 10 in (9, 10))
    rows, inputs, seed = 4096, 2048, empty(2, dtype=torch.int32)
    with recorded(monkeypatch) as launches:
        for outputs in ([2048], [2048, 1024, 1024]):
            slots = len(outputs)
            x, a, u = empty(rows, inputs + 512), empty(rank * slots, inputs), empty(rows, rank * slots)
            for p in (0.0, 0.1):
                adapters.down(x, a, u, x[:, inputs:], seed, slots, p, range(slots))
            dy, b = empty(rows, sum(outputs) + 512), empty(sum(outputs), rank * slots)
            adapters.gradients(dy, u, b, inputs, outputs, rank, 1.0)
            adapters.down_gradient(x[:, :inputs], u, empty(64, dtype=torch.int32))
            adapters.dropped_gradient(x[:, :inputs], u, seed, slots, 0.1, range(slots))
            adapters.add_dropped(x[:, :inputs], u, a, seed, slots, 0.1, range(slots))
    for launch in launches:
        found = launch.compile(capability).metadata.shared
        assert found <= SHARED[capability] * 1024, f"{launch.program.__name__} needs {found} bytes"
