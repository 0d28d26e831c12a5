"""Gradients that are left as products: in graphs, into sums, and several as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from surogate_recipe_fp8.gemm import FP8Hybrid
from torch import Tensor

from surogate_core.dsl import products
from surogate_core.dsl.products import Product, add_products, write_gradients
from surogate_core.dsl.slots import LinearSlot, TracedSlot
from surogate_core.dsl.trace import Recompute, Signature, differentiate, with_gradients
from surogate_core.formats import fp8
from surogate_core.kernels.ops import rms_norm

N, I, O = 5, 4, 6  # noqa: E741


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_autograd(function: object, values: list[Tensor], dy: Tensor) -> list[Tensor]:
    assert callable(function)
    leaves = [v.detach().requires_grad_() for v in values]
    return list(torch.autograd.grad(function(*leaves), leaves, dy))


def value_of(gradient: Tensor | Product) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else gradient.left_ON @ gradient.right_NI


def two_weights(first_OI: Tensor, scale_O: Tensor, second_OI: Tensor, x_NI: Tensor) -> Tensor:
    return torch.tanh(x_NI @ first_OI.t()) * scale_O + x_NI @ second_OI.t()


@pytest.mark.parametrize(
    ("compiler", "recompute"),
    [
        ("fx", False),
        ("fx", True),
        *(pytest.param("inductor", value, marks=pytest.mark.slow) for value in (False, True)),
    ],
)
def test_products_of_a_program(compiler: str, recompute: bool) -> None:
    values = [random(O, I), random(O, seed=1), random(O, I, seed=2), random(N, I, seed=3)]
    dy = random(N, O, seed=4)
    inputs = [Signature.of(v, requires_grad=True) for v in values]
    program = differentiate(
        two_weights,
        inputs,
        recompute=Recompute(block=recompute),
        compiler=compiler,  # type: ignore[arg-type]
        summed=3,
    )
    _, *kept = program.forward(values)
    found = program.backward([*values, *kept, dy])
    assert [type(g) is Product for g in found] == [True, False, True, False]
    for gradient, expected in zip(found, by_autograd(two_weights, values, dy), strict=True):
        torch.testing.assert_close(value_of(gradient), expected)


@pytest.mark.parametrize(
    ("compiler", "recompute"), [("fx", False), ("fx", True), pytest.param("inductor", False, marks=pytest.mark.slow)]
)
def test_products_of_codes_give_their_codes_and_scales(compiler: str, recompute: bool) -> None:
    """The slots of FP8 products: what is added is the product of the codes, not rounded to the weight's dtype."""
    n, i, o = 32, 48, 64
    recipe = FP8Hybrid(native=True, margin=0, history=3, note="")
    slot = LinearSlot(name="q", module="q_proj", inputs=i, outputs=o, bias=False, region="qkv", adapter=None, index=0)

    def function(weight_OI: Tensor, row: Tensor, x_NI: Tensor) -> Tensor:
        return recipe.linear(x_NI, weight_OI, TracedSlot.of(slot, seed=None, row=row, packed=False))

    weight, x, dy = (random(*shape).bfloat16() for shape in ((o, i), (n, i), (n, o)))
    row = torch.tensor([64.0, 32.0, 1024.0])
    inputs = [Signature.of(v, requires_grad=True) for v in (weight, row, x)]
    program = differentiate(
        function,
        inputs,
        recompute=Recompute(block=recompute),
        compiler=compiler,  # type: ignore[arg-type]
        summed=1,
    )
    _, *kept = program.forward([weight, row, x])
    product, *_ = program.backward([weight, row, x, *kept, dy])
    assert isinstance(product, Product)
    assert product.inverses is not None
    codes = fp8.quantise(dy, row[2], fp8.E5M2).double().t() @ fp8.quantise(x, row[0], fp8.E4M3).double()
    total = random(o, i, seed=5)
    expected = total.double() + codes / (64 * 1024)
    for add in (True, False):
        sums = total.clone()
        (product.add_to if add else product.write_to)(sums)
        torch.testing.assert_close(sums.double(), expected - (0 if add else total), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("shared", "bias", "coded"), [(True, False, True), (True, True, False), (False, True, False)])
def test_a_product_of_codes_with_a_bias_is_not_taken_apart(shared: bool, bias: bool, coded: bool) -> None:
    """Also where both factors have one scale, so that a bias is a fourth tensor."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight_OI: Tensor, x_NI: Tensor, scale: Tensor, other: Tensor, bias_I: Tensor) -> Tensor:
            ctx.save_for_backward(x_NI, weight_OI, scale, other, bias_I)
            return x_NI @ weight_OI.t()

        @staticmethod
        def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
            x_NI, weight_OI, scale, other, bias_I = ctx.saved_tensors
            left_ON, right_IN = (t.t().contiguous().to(fp8.E4M3) for t in (dy_NO, x_NI))
            scales = (scale, scale if shared else other)
            added = bias_I if bias else None
            dweight = torch._scaled_mm(left_ON, right_IN.t(), *scales, added, out_dtype=torch.bfloat16)
            return dweight, dy_NO @ weight_OI, None, None, None

    values = [random(16, 16).bfloat16(), random(16, 16, seed=3).bfloat16(), torch.tensor(0.5), torch.tensor(0.25)]
    values.append(random(16, seed=4).bfloat16())
    inputs = [Signature.of(v, requires_grad=number < 2) for number, v in enumerate(values)]
    program = differentiate(Linear.apply, inputs, recompute=Recompute(block=False), compiler="fx", summed=1)
    _, *kept = program.forward(values)
    dy = random(16, 16, seed=5).bfloat16()
    gradient, *_ = program.backward([*values, *kept, dy])
    assert isinstance(gradient, Product) == coded
    codes = dy.to(fp8.E4M3).double().t() @ values[1].to(fp8.E4M3).double()
    expected = codes * 0.5 * (0.5 if shared else 0.25) + (values[4].double() if bias else 0)
    total = torch.zeros(16, 16)
    write_gradients([(total, gradient)])
    torch.testing.assert_close(total.double(), expected, rtol=1e-2, atol=1e-2)


def test_products_of_codes_are_not_merged() -> None:
    """Each has scales of its own."""
    one, total = torch.ones(()), torch.zeros(8, I)
    lefts = torch.ones(8, N).to(fp8.E5M2).split(4)
    right = torch.ones(I, N).to(fp8.E4M3).t()
    parts = zip(total.split(4), lefts, (one, 2 * one), strict=True)
    assert add_products([(part, Product(left, right, (scale, one))) for part, left, scale in parts]) == []
    assert torch.equal(total, torch.tensor([float(N), 2.0 * N]).repeat_interleave(4)[:, None].expand(8, I))


def test_only_the_inputs_that_are_summed_are_left() -> None:
    """dx is a product of two matrices as well, and the next block wants it multiplied out."""
    values = [random(O, I), random(N, I, seed=3)]
    inputs = [Signature.of(v, requires_grad=True) for v in values]

    def loss(weight_OI: Tensor, x_NI: Tensor) -> Tensor:
        return (x_NI @ weight_OI.t()).square().sum()

    y, dweight, dx = with_gradients(loss, inputs, compiler="fx", summed=1)([*values, torch.ones(())])
    assert isinstance(dweight, Product)
    expected = by_autograd(loss, values, torch.ones(()))
    torch.testing.assert_close(value_of(dweight), expected[0])
    torch.testing.assert_close(dx, expected[1])
    torch.testing.assert_close(y, loss(*values))


def test_frozen_inputs_between() -> None:
    values = [random(O, I), random(O, seed=1), random(O, I, seed=2), random(N, I, seed=3)]
    inputs = [Signature.of(v, requires_grad=number != 0) for number, v in enumerate(values)]
    program = differentiate(two_weights, inputs, recompute=Recompute(block=False), compiler="fx", summed=3)
    _, *kept = program.forward(values)
    found = program.backward([*values, *kept, random(N, O, seed=4)])
    assert [type(g) is Product for g in found] == [False, True, False]


def test_a_product_that_is_read_elsewhere_stays() -> None:
    """A gradient that is scaled after the product, and one that is given to two inputs."""
    values = [random(O, I), random(O, I, seed=2), random(N, I, seed=3)]
    inputs = [Signature.of(v, requires_grad=True) for v in values]

    def function(first_OI: Tensor, second_OI: Tensor, x_NI: Tensor) -> Tensor:
        return x_NI @ (first_OI + 2 * second_OI).t()

    program = differentiate(function, inputs, recompute=Recompute(block=False), compiler="fx", summed=2)
    dy = random(N, O, seed=4)
    _, *kept = program.forward(values)
    found = program.backward([*values, *kept, dy])
    assert not any(isinstance(g, Product) for g in found)
    for gradient, expected in zip(found, by_autograd(function, values, dy), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_a_sum_keeps_its_digits_and_an_emulated_product_its_rounding() -> None:
    values = [random(I).bfloat16(), random(O, I, seed=1).bfloat16(), random(N, I, seed=2).bfloat16()]
    inputs = [Signature.of(v, requires_grad=True) for v in values]

    def function(scale_I: Tensor, weight_OI: Tensor, x_NI: Tensor) -> Tensor:
        return rms_norm(x_NI, scale_I, 1e-6).float() @ weight_OI.float().t()

    program = differentiate(function, inputs, recompute=Recompute(block=False), compiler="fx", summed=2)
    _, *kept = program.forward(values)
    dscale, dweight, dx = program.backward([*values, *kept, random(N, O, seed=4)])
    assert [t.dtype for t in (dscale, dweight, dx)] == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_into_a_sum(dtype: torch.dtype) -> None:
    left, right, total = random(O, N).to(dtype), random(N, I, seed=1).to(dtype), random(O, I, seed=2)
    expected = total.double() + left.double() @ right.double()
    (plain,) = add_products([(total, Product(left, right)), (random(3), random(3))])
    assert plain[1].shape == (3,)
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(total.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_a_sum_that_does_not_count(dtype: torch.dtype) -> None:
    left, right, total = random(O, N).to(dtype), random(N, I, seed=1).to(dtype), torch.full((O, I), torch.nan)
    plain, scale_O = torch.full((O,), torch.nan), random(O, seed=2).to(dtype)
    write_gradients([(total, Product(left, right)), (plain, scale_O)])
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(total.double(), left.double() @ right.double(), rtol=bound, atol=bound)
    assert torch.equal(plain, scale_O.float())


def test_neighbours_are_multiplied_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one dy with one x into rows of one sum: three projections, the last of another x."""
    dy, x, other = random(N, 9), random(N, I, seed=1), random(N, I, seed=2)
    totals = random(9, I, seed=3)
    expected = totals.clone()
    parts = [(slice(0, 4), x), (slice(4, 6), x), (slice(6, 9), other)]
    for rows, right in parts:
        expected[rows] += dy[:, rows].t() @ right
    calls: list[tuple[int, ...]] = []
    plain = Product.add_to
    monkeypatch.setattr(
        products.Product, "add_to", lambda self, total: (calls.append(tuple(total.shape)), plain(self, total))[1]
    )
    assert add_products([(totals[rows], Product(dy[:, rows].t(), right)) for rows, right in parts]) == []
    assert calls == [(6, I), (3, I)]
    torch.testing.assert_close(totals, expected)


@pytest.mark.parametrize("apart", ["sums", "factors", "gap"])
def test_what_does_not_stand_in_a_row_is_multiplied_alone(apart: str) -> None:
    dy, x, totals = random(N, 6), random(N, I, seed=1), random(7, I, seed=3)
    lefts = [dy[:, :3].t(), dy[:, 3:].t()]
    sums = [totals[:3], totals[3:6]]
    if apart == "sums":
        sums = [totals[3:6], totals[:3]]
    elif apart == "gap":
        sums[1] = totals[4:7]
    else:
        lefts[1] = lefts[1].clone(memory_format=torch.contiguous_format)
    expected = [total + left @ x for total, left in zip(sums, lefts, strict=True)]
    add_products([(total, Product(left, x)) for total, left in zip(sums, lefts, strict=True)])
    for total, wanted in zip(sums, expected, strict=True):
        torch.testing.assert_close(total, wanted)
