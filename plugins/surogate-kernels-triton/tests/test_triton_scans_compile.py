"""The programs of scans compile for every architecture, as they are launched; no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import re

import pytest
import torch

from surogate_testing.triton_programs import SHARED, empty, recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]
PROGRAMS = {
    "scan_places",
    "scan_decays",
    "delta_systems",
    "delta_blocks",
    "delta_inverses",
    "delta_values",
    "scan_states",
    "scan_outputs",
    "delta_value_gradients",
    "scan_state_gradients",
    "scan_value_gradients",
    "scan_key_gradients",
    "add_parts",
}
SHAPES = {"nemotron-3-nano": (8, 64, 128, 64), "nemotron-nano-9b-v2": (8, 128, 128, 80), "qwen3.5": (16, 32, 128, 128)}
"""Heads of keys, of values, features of a key, of a value."""


def launch(shape: tuple[int, int, int, int], dtype: torch.dtype, delta: bool, *, states: bool) -> None:
    """Forward and backward."""
    from surogate_kernels_triton import scans

    groups, heads, keys, values = shape
    rows, runs = 4096, 5
    q, k, v = (empty(rows, h, size, dtype=dtype) for h, size in ((groups, keys), (groups, keys), (heads, values)))
    decay = empty(rows, heads, dtype=torch.float32)
    state = empty(runs, heads, keys, values, dtype=torch.float32) if states else None
    inputs = (q, k, v, decay, decay, empty(runs + 1, dtype=torch.int32), state)
    scans._forward._init_fn(*inputs, states, delta)
    scans._backward._init_fn(v, state, *inputs, delta)


@pytest.mark.parametrize("capability", SHARED)
def test_every_program_compiles(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the shared memory of a block."""
    from surogate_kernels_triton import scans_tiles

    monkeypatch.setattr(scans_tiles, "large", lambda device: capability // 10 in (9, 10))
    with recorded(monkeypatch) as launches:
        for name, shape in SHAPES.items():
            launch(shape, torch.bfloat16, name == "qwen3.5", states=False)
        launch(SHAPES["qwen3.5"], torch.bfloat16, True, states=True)
        launch((2, 4, 64, 32), torch.float32, False, states=True)
    assert {found.program.__name__ for found in launches} == PROGRAMS
    seen: set[str] = set()
    for found in launches:
        compiled = found.compile(capability)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            needed = compiled.metadata.shared
            assert needed <= SHARED[capability] * 1024, f"{found.program.__name__} {found.options} needs {needed} bytes"


@pytest.mark.parametrize("delta", [False, True], ids=["ssd", "gated_delta"])
def test_hopper_reads_registers_that_are_written(delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With values of 16 and 32 features in as many columns ptxas 12.8 forgot to write some: outputs were wrong."""
    from surogate_kernels_triton import scans_tiles

    monkeypatch.setattr(scans_tiles, "large", lambda device: True)
    with recorded(monkeypatch) as launches:
        for keys in (16, 64, 128):
            for values in (16, 32, 80, 128):
                launch((2, 4, keys, values), torch.bfloat16, delta, states=True)
    for found in launches:
        found.compile(90)


def test_hopper_multiplies_from_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs with many `wgmma` whose left operand is in registers ended in illegal memory accesses with some
    numbers of warps. ptxas 12.8, which Triton 3.6 has, makes wrong code of such (triton-lang/triton 9433, 11366).
    One product may be such, of decayed scores.
    """
    from surogate_kernels_triton import scans_tiles

    monkeypatch.setattr(scans_tiles, "large", lambda device: True)
    with recorded(monkeypatch) as launches:
        for name, shape in SHAPES.items():
            launch(shape, torch.bfloat16, name == "qwen3.5", states=False)
    seen: set[str] = set()
    for found in launches:
        name = found.program.__name__
        scores = name in ("scan_outputs", "delta_value_gradients") or (
            name == "scan_value_gradients" and not found.arguments["DELTA"]
        )
        compiled = found.compile(90)
        if scores or compiled.hash in seen:
            continue
        seen.add(compiled.hash)
        lines = re.findall(r"wgmma\.mma_async[^;]*;", compiled.asm["ptx"])
        assert not [line for line in lines if line.count("{") > 1], f"{name} {found.options}"
    assert seen
