"""Experts that ranks share out, in float64 against one rank: values, and gradients of tokens, routes and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.dsl.declare import Adapter
from surogate_core.dsl.experts import BoundExperts, ExpertSlot, Routes, mixture, project, project_combined
from surogate_core.formats import fp8_rows
from surogate_core.kernels.balancing.plan import LoadBalance
from surogate_core.kernels.expert_ranks import ExpertRanks
from surogate_core.kernels.linked import among
from surogate_testing.op_cases import random
from surogate_testing.virtual import in_threads

TOKENS, WIDTH, INNER = 6, 4, 3
EVEN = LoadBalance(threshold=1.0)
HALVES = {"halves": True}


def slot(name: str, count: int, choices: int, inputs: int, outputs: int, index: int) -> ExpertSlot:
    adapter = Adapter(rank=2, scale=0.5, dropout=0.0, dtype=torch.float64)
    return ExpertSlot(
        name=name,
        module=f"{name}.{{e}}",
        count=count,
        choices=choices,
        inputs=inputs,
        outputs=outputs,
        region="ffn",
        fused=None,
        adapter=adapter,
        index=index,
    )


def weights(count: int) -> dict[str, Tensor]:
    shapes = {
        "up.weight": (count, INNER, WIDTH),
        "up.lora_A": (count, 2, WIDTH),
        "up.lora_B": (count, INNER, 2),
        "down.weight": (count, WIDTH, INNER),
        "down.lora_A": (count, 2, INNER),
        "down.lora_B": (count, WIDTH, 2),
        "bias": (count, INNER),
        "last bias": (count, WIDTH),
    }
    return {name: random(*shape, seed=n).double() for n, (name, shape) in enumerate(shapes.items())}


def layer(x: Tensor, logits: Tensor, tensors: Mapping[str, Tensor], choices: int, *, halves: bool) -> Tensor:
    """[N, D]: experts of an up and a down projection with biases; `halves`: by `mixture`, which may exchange halves."""
    count = len(tensors["up.weight"])
    routes = Routes.of(logits, choices, renormalise=True)

    def bound(name: str, inputs: int, outputs: int, index: int) -> BoundExperts:
        own = {n.removeprefix(f"{name}."): t for n, t in tensors.items() if n.startswith(name)}
        return BoundExperts(slot(name, count, choices, inputs, outputs, index), own, seed=None)

    up, down = bound("up", WIDTH, INNER, 0), bound("down", INNER, WIDTH, 1)
    if halves:
        y = mixture(x, routes, [up], lambda of, rows: torch.tanh(of.biased(rows, tensors["bias"])), down)
    else:
        (rows,) = project(x, routes, up)
        y = project_combined(torch.tanh(routes.biased(rows, tensors["bias"])), routes, down)
    return y + routes.combined_bias(tensors["last bias"])


def results(
    x: Tensor, logits: Tensor, dy: Tensor, tensors: Mapping[str, Tensor], choices: int, *, halves: bool = False
) -> dict[str, Tensor]:
    """Values and gradients; with `halves` the experts' own weights are frozen."""
    leaves = {"x": x, "logits": logits, **tensors}
    leaves = {name: t.clone().requires_grad_(not (halves and "weight" in name)) for name, t in leaves.items()}
    y = layer(leaves["x"], leaves["logits"], {n: leaves[n] for n in tensors}, choices, halves=halves)
    trained = {name: t for name, t in leaves.items() if t.requires_grad}
    found = torch.autograd.grad(y, list(trained.values()), dy)
    return {"y": y.detach(), **dict(zip(trained, found, strict=True))}


@pytest.mark.parametrize("load", ["drawn", "all on one rank", "no token here"])
@pytest.mark.parametrize(("experts", "choices", "ranks"), [(4, 2, 2), (4, 4, 4), (8, 3, 4), (6, 1, 2)])
@pytest.mark.parametrize(
    "how",
    [{}, {"rows": True}, {"balance": EVEN}, {"rows": True, "balance": EVEN}, HALVES, {"balance": EVEN, **HALVES}],
    ids=["sums", "rows", "even sums", "even rows", "halves", "even halves"],
)
def test_values_and_gradients(experts: int, choices: int, ranks: int, how: dict[str, Any], load: str) -> None:
    """Each rank has its own tokens; the gradients of experts are those of all tokens together."""
    x, logits = random(ranks, TOKENS, WIDTH, seed=20).double(), random(ranks, TOKENS, experts, seed=21).double()
    dy, tensors = random(ranks, TOKENS, WIDTH, seed=22).double(), weights(experts)
    if load == "all on one rank":
        logits += torch.arange(experts).flip(0) * 50.0
    if load == "no token here":
        dy[0] = 0.0  # padding
    how, halves = {n: value for n, value in how.items() if n != "halves"}, "halves" in how
    alone = [results(x[r], logits[r], dy[r], tensors, choices, halves=halves) for r in range(ranks)]

    def work(fabric: Any) -> dict[str, Tensor]:
        group = ExpertRanks(fabric.world, **how)
        group.open(fabric)
        each = experts // ranks
        part = slice(fabric.rank * each, (fabric.rank + 1) * each)
        own = {n: t if "bias" in n else t[part].contiguous() for n, t in tensors.items()}
        with among(group):
            found = results(x[fabric.rank], logits[fabric.rank], dy[fabric.rank], own, choices, halves=halves)
        group.close()
        return found

    found = in_threads(ranks, work)
    for mine, one in zip(found, alone, strict=True):
        for name in ("y", "x", "logits"):
            torch.testing.assert_close(mine[name], one[name], rtol=1e-12, atol=1e-12)
            assert "rows" not in how or torch.equal(mine[name], one[name]), name
    for name in tensors.keys() & alone[0].keys():
        total = torch.stack([one[name] for one in alone]).sum(0)
        summed = torch.stack([mine[name] for mine in found]).sum(0) if "bias" in name else None
        whole = torch.cat([mine[name] for mine in found]) if summed is None else summed
        torch.testing.assert_close(whole, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [False, True])
def test_rows_that_others_compute_have_the_same_bits(
    dtype: torch.dtype, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes at which a product might depend on how many rows it has; half of those of one rank move."""
    monkeypatch.setitem(globals(), "WIDTH", 64)
    monkeypatch.setitem(globals(), "INNER", 96)
    tensors = {name: t.to(dtype) for name, t in weights(8).items()}
    x = random(2, 128, 64, seed=20).to(dtype)
    # All tokens choose two experts of the first rank, one of which then moves.
    logits = random(2, 128, 8, seed=21) + 50.0 * (torch.arange(8) < 2)

    def work(fabric: Any, balance: LoadBalance | None) -> dict[str, Tensor]:
        group = ExpertRanks(2, rows=rows, balance=balance)
        group.open(fabric)
        own = {n: t if "bias" in n else t.chunk(2)[fabric.rank].contiguous() for n, t in tensors.items()}
        with among(group):
            found = results(x[fabric.rank], logits[fabric.rank], torch.ones_like(x[0]), own, 2)
        assert (group.moved is None) == (balance is None)
        assert group.moved is None or group.moved.figures.tolist() == [2.0, 1.0, 0.5, 1.0]
        group.close()
        return found

    apart, even = in_threads(2, lambda fabric: work(fabric, None)), in_threads(2, lambda fabric: work(fabric, EVEN))
    for one, other in zip(apart, even, strict=True):
        # A sum of two in another order has the same bits.
        for name in ("y", "x", "logits"):
            assert torch.equal(one[name], other[name]), name
        for name in (n for n in tensors if "bias" not in n):
            torch.testing.assert_close(other[name], one[name], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_packed_experts_are_those_of_their_ranks() -> None:
    """What a rank gets for all experts that it has then is what packing these gives."""
    weights_EOI = random(8, 32, 16, seed=1)
    logits = random(2, TOKENS, 8, seed=21) + 50.0 * (torch.arange(8) < 2)

    def work(fabric: Any) -> None:
        group = ExpertRanks(2, balance=EVEN)
        group.open(fabric)
        own = fp8_rows.pack_experts(weights_EOI.chunk(2)[fabric.rank])
        with among(group):
            Routes.of(logits[fabric.rank], 2, renormalise=True)
        moved = group.moved
        assert moved is not None
        count = len(moved.numbers_L)
        found = moved.packed_with_others(own, *(fp8_rows.packed_parts(n, 32, 16) for n in (4, count)))
        assert torch.equal(found, fp8_rows.pack_experts(weights_EOI[moved.numbers_L]))
        assert not moved.numbers_L[4:].div(4, rounding_mode="floor").eq(fabric.rank).any(), "of other ranks"
        group.close()

    in_threads(2, work)


def test_moved_experts_are_trained_where_they_are() -> None:
    """A frozen weight that is sent beside an adapter has no gradient, which a kernel would not compute."""
    logits = random(2, TOKENS, 4, seed=21)

    def work(fabric: Any) -> None:
        group = ExpertRanks(2, balance=EVEN)
        group.open(fabric)
        frozen, trained = random(2, 3, 5, seed=1), random(2, 2, 5, seed=2).requires_grad_()
        with among(group):
            Routes.of(logits[fabric.rank], 2, renormalise=True)
        assert group.moved is not None
        found = group.moved.with_others([frozen, trained])
        assert [tensor.requires_grad for tensor in found] == [False, True]
        (gradient,) = torch.autograd.grad(found[1].sum(), trained)
        assert gradient.shape == trained.shape
        group.close()

    in_threads(2, work)


def test_places_that_no_row_takes_are_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may leave them as they are in memory, and NaN."""
    from surogate_core.kernels import experts as reference

    plain = reference.grouped_product

    def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        taken = (torch.arange(len(x)) < ends[-1])[:, None]
        return _Spoilt.apply(plain(_Spoilt.apply(x, taken, False), w, ends), taken, True)

    tensors, x, logits = weights(4), random(2, TOKENS, WIDTH, seed=20).double(), random(2, TOKENS, 4, seed=21).double()
    wanted = [results(x[r], logits[r], torch.ones_like(x[r]), tensors, 2) for r in range(2)]
    monkeypatch.setattr(reference, "grouped_product", product)
    for how in ({}, {"rows": True}, {"balance": EVEN}, {"rows": True, "balance": EVEN}):

        def work(fabric: Any, how: dict[str, Any] = how) -> dict[str, Tensor]:
            group = ExpertRanks(2, **how)
            group.open(fabric)
            own = {n: t if "bias" in n else t.chunk(2)[fabric.rank].contiguous() for n, t in tensors.items()}
            with among(group):
                found = results(x[fabric.rank], logits[fabric.rank], torch.ones_like(x[0]), own, 2)
            group.close()
            return found

        for mine, one in zip(in_threads(2, work), wanted, strict=True):
            assert all(bool(t.isfinite().all()) for t in mine.values())
            torch.testing.assert_close(mine["y"], one["y"], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(mine["x"], one["x"], rtol=1e-12, atol=1e-12)


class _Spoilt(torch.autograd.Function):
    """NaN in places that no row takes: of values with `outputs`, otherwise of gradients."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, taken: Tensor, outputs: bool) -> Tensor:
        ctx.save_for_backward(taken)
        ctx.outputs = outputs
        return torch.where(taken, y, torch.nan) if outputs else y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (taken,) = ctx.saved_tensors
        return dy if ctx.outputs else torch.where(taken, dy, torch.nan), None, None
