"""The programs of experts compile for every architecture, as they are launched for Qwen3-30B-A3B; no GPU is needed."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.plugin import fp8
from surogate_testing.triton_programs import SHARED, Launch, check_compiled, empty, recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]
PROGRAMS = {
    *("choose", "scan", "scatter", "tile_table"),
    *("sum_rows", "combine_backward", "forward_of_rows", "backward_of_rows"),
    *("down", "up", "factors", "weight_factors"),
}
TOKENS, EXPERTS, CHOICES, WIDTH, INNER = 8192, 128, 8, 2048, 768


def codes(rank: int, order: Tensor, ends: Tensor) -> None:
    from surogate_kernels_triton import experts_launches

    rows = len(order)
    for inputs, outputs, count, gathered in (
        (WIDTH, INNER, 1, True),
        (INNER, WIDTH, 1, False),
        (INNER, WIDTH, 2, False),
    ):
        x = [experts_launches.round_rows(empty(TOKENS if gathered else rows, inputs)) for _ in range(count)]
        w = [(empty(EXPERTS, outputs, inputs, dtype=fp8.E4M3), empty(EXPERTS, outputs, dtype=torch.float32))] * count
        b = [empty(EXPERTS, outputs, rank)] * count
        where = order if gathered else None
        named: dict[str, Any] = {"choices": CHOICES, "scale": 2.0, "backward": False, "dtype": torch.bfloat16}
        experts_launches.grouped_codes(x, w, empty(rows, rank * count), b, where, ends, rows, **named)


def plain(rows: int, inputs: int, outputs: int, ends: Tensor) -> None:
    """Products of trained weights and their gradients."""
    from surogate_kernels_triton import experts_plain

    x, dy, w = empty(rows, inputs), empty(rows, outputs), empty(EXPERTS, outputs, inputs)
    experts_plain._product._init_fn(x, w, ends)
    experts_plain._product._init_fn(dy, w.transpose(1, 2), ends)
    experts_plain._factors._init_fn(dy, x, ends)


def everything(capability: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """All launches of a layer with experts, forward and backward."""
    from surogate_kernels_triton import (
        experts_adapters,
        experts_combined,
        experts_frozen,
        experts_launches,
        experts_routing,
        swiglu,
    )

    rows = TOKENS * CHOICES
    major = capability // 10
    monkeypatch.setattr(experts_launches, "large", lambda device: major in (9, 10))
    order, ends = torch.zeros(rows, dtype=torch.int32), empty(EXPERTS, dtype=torch.int32)
    slot, weights = empty(TOKENS, CHOICES, dtype=torch.int32), empty(TOKENS, CHOICES, dtype=torch.float32)

    def linears(x: Tensor, outputs: int, projections: int, masks: tuple[Any, ...]) -> None:
        where = (order, slot) if x.shape[0] == TOKENS else (None, None)
        inputs = x.shape[1]
        w = [empty(EXPERTS, outputs, inputs)] * projections
        a, b = [empty(EXPERTS, rank, inputs)] * projections, [empty(EXPERTS, outputs, rank)] * projections
        dys = [empty(rows, outputs)] * projections
        parted = [empty(count, outputs, inputs) for count in (EXPERTS - 4, 4) for _ in range(projections)]
        experts_frozen._forward._init_fn(x, where[0], ends, parted, [], a, b, 2.0, CHOICES, *masks)
        *_, u = experts_frozen._forward._init_fn(x, where[0], ends, w, [], a, b, 2.0, CHOICES, *masks)
        experts_frozen._backward._init_fn(dys, x, *where, ends, w, [], a, b, u, 2.0, CHOICES, *masks)
        experts_adapters._rows._init_fn(x, where[0], ends, a, CHOICES, *masks)
        experts_adapters._rows_backward._init_fn(empty(rows, inputs), u, x, *where, ends, a, CHOICES, *masks)
        experts_adapters._up._init_fn(dys[0], u[:, :rank], ends, b[0], 2.0)
        experts_adapters._up_backward._init_fn(dys[0], u[:, :rank], ends, b[0], 2.0)

    def combined(masks: tuple[Any, ...]) -> None:
        x, u = empty(rows, INNER), [empty(rows, rank)]
        w = [empty(EXPERTS - 4, WIDTH, INNER), empty(4, WIDTH, INNER)]
        a, b = [empty(EXPERTS, rank, INNER)], [empty(EXPERTS, WIDTH, rank)]
        backward = experts_combined._backward._init_fn
        for parts in (False, True):
            backward(empty(TOKENS, WIDTH), x, order, slot, ends, weights, w, [], a, b, u, 2.0, *masks, parts)

    with recorded(monkeypatch) as launches:
        plain(rows, WIDTH, INNER, ends)
        logits = empty(TOKENS, EXPERTS)
        experts_routing._route._init_fn(logits, CHOICES, True, False, None, 1.0)
        experts_routing._route._init_fn(logits, CHOICES, True, True, empty(EXPERTS, dtype=torch.float32), 2.5)
        dout, y = empty(TOKENS, WIDTH), empty(rows, WIDTH)
        for parts in (False, True):
            experts_routing.sum_rows._init_fn(y, slot, weights, parts)
        for each in (dout, dout.float()):
            experts_routing._combine_backward._init_fn(each, y, order, slot, weights, False)
        gate = empty(rows, INNER)
        swiglu._of_experts._init_fn(gate, gate, ends)
        swiglu._of_experts_backward._init_fn(gate, gate, gate, ends)
        if major == 9:
            codes(rank, order, ends)
        for masks in ((None, 0.0, []), (ends[0], 0.1, [0, 1])):
            linears(empty(TOKENS, WIDTH), INNER, 2, masks)
            linears(empty(rows, INNER), WIDTH, 1, masks)
            combined(masks)
    return launches


RANKS = [(capability, 16) for capability in SHARED] + list(itertools.product((89, 90, 100, 120), (32, 64, 128)))


@pytest.mark.parametrize(("capability", "rank"), RANKS)
def test_every_program_compiles(capability: int, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within the shared memory of a block, and with next to nothing outside of registers."""
    launches = everything(capability, rank, monkeypatch)
    products = {"product_copied"} if capability // 10 in (9, 10) else {"product"}
    products |= {"product_codes", "round_rows"} if capability // 10 == 9 else set()
    assert {launch.program.__name__ for launch in launches} == PROGRAMS | products
    check_compiled(launches, capability, tmp_path / "program.cubin")
