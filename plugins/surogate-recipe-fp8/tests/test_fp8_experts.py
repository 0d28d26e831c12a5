"""The products of experts against the values of their rounded operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from surogate_recipe_fp8 import FP8Options, without_experts
from surogate_recipe_fp8.experts import ExpertProducts
from surogate_recipe_fp8.gemm import FP8Hybrid
from torch import Tensor

from surogate_core.plugin import MachineError, fp8_rows
from surogate_core.service.kernels import masked_factors, masked_product
from surogate_testing import tiny
from surogate_testing.recipes import EXPERTS

RECIPE = FP8Hybrid(native=False, margin=0, history=1, note="")
LOADS = (5, 0, 40, 1)
ENDS = torch.tensor(LOADS).cumsum(0).int()
ROWS = sum(LOADS)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor) -> Tensor:
    return fp8_rows.row_values(*fp8_rows.quantise_rows(x), torch.float64)


@pytest.mark.parametrize("how", ["emulated", "native"])
@pytest.mark.parametrize("packed", [False, True], ids=["trained", "packed"])
def test_products_are_of_the_rounded_operands(packed: bool, how: str) -> None:
    """y and dx of both projections; dW of operands that are not rounded. A native product's result is bf16."""
    native = how == "native"
    dtype, near = (torch.bfloat16, 2**-7) if native else (torch.float32, 1e-6)
    recipe = FP8Hybrid(native=native, margin=0, history=1, note="", experts=ExpertProducts(native))
    slots = [replace(slot, packed=packed) for slot in EXPERTS]
    x = normal(ROWS, 64, seed=0).to(dtype).requires_grad_()
    ws = [normal(4, s.outputs, 64, seed=1).to(dtype) for s in slots]
    dys = [normal(ROWS, s.outputs, seed=2).to(dtype) * 1e-6 for s in slots]
    kept = [recipe.pack_experts(w, s) if packed else w.clone().requires_grad_() for w, s in zip(ws, slots, strict=True)]
    ys = recipe.grouped(x, kept, ENDS, slots)
    found = torch.autograd.grad(list(ys), [x] if packed else [x, *kept], dys)
    dx = torch.zeros(ROWS, 64, dtype=torch.float64)
    for number, (y, w, dy) in enumerate(zip(ys, ws, dys, strict=True)):
        assert tiny.relative_error(y, masked_product(rounded(x.detach()), rounded(w), ENDS)) < near
        turned = rounded(w.transpose(1, 2))
        dx += masked_product(rounded(dy), turned, ENDS)
        if not packed:
            exact = masked_factors(dy.double(), x.detach().double(), ENDS)
            assert tiny.relative_error(found[1 + number], exact) < near
            assert not found[1 + number][1].any()  # it has no rows
    assert tiny.relative_error(found[0], dx) < near


def test_a_row_that_is_not_finite_spoils_only_itself() -> None:
    x = normal(ROWS, 64, seed=0)
    x[7, 3] = torch.inf
    (y, _) = RECIPE.grouped(x, [normal(4, s.outputs, 64, seed=1) for s in EXPERTS], ENDS, EXPERTS)
    assert y[7].isnan().all()
    assert y.isfinite().all(-1).sum() == ROWS - 1


def test_where_products_of_experts_run() -> None:
    assert without_experts(torch.device("cpu")) == "cpu has none"
    assert "EMULATED" not in FP8Hybrid.of(FP8Options(), None).note_of_experts
    elsewhere = FP8Hybrid.of(FP8Options(), None, experts="only SM90 has them")
    assert elsewhere.native
    assert not elsewhere.experts.native
    assert elsewhere.note_of_experts.startswith("EMULATED FP8 products of experts (only SM90 has them): numbers")
    always = FP8Hybrid.of(FP8Options(emulate="always"), None)
    assert always.note_of_experts.startswith("EMULATED FP8 products of experts (recipe.emulate=always)")
    never = FP8Hybrid.of(FP8Options(emulate="never"), None, experts="only SM90 has them")
    with pytest.raises(MachineError, match=r"recipe\.emulate=never.*only SM90.*Fix: set recipe\.emulate=auto"):
        never.grouped(normal(ROWS, 64, seed=0), [], ENDS, EXPERTS)


def test_a_product_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at the start of a run, with the CPU in the place of a GPU."""
    cpu, right = torch.device("cpu"), fp8_rows.native_product
    assert fp8_rows.fault.__wrapped__(cpu) is None

    def broken(what: str) -> None:
        def product(*operands: Tensor, **named: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) % 2 == 0 and what == "raises":
                raise RuntimeError("no such kernel\nat a line")
            return right(*operands) * (1.5 if len(calls) % 2 == 0 else 1)

        calls: list[int] = []
        monkeypatch.setattr(fp8_rows, "native_product", product)

    broken("raises")
    assert fp8_rows.fault.__wrapped__(cpu) == "torch's grouped FP8 product fails: no such kernel"
    broken("is wrong")
    assert fp8_rows.fault.__wrapped__(cpu) == "torch's grouped FP8 product gives a wrong x Wᵀ"
