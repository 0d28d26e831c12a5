"""Kernels of experts against their references in float64: on a GPU or, with TRITON_INTERPRET=1, in the interpreter.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from surogate_core.plugin import compute, fp8_rows
from surogate_core.service.kernels import experts as ops
from surogate_testing.interpreter import INTERPRETED, devices, run_interpreted, starts_interpreter
from surogate_testing.op_cases import random

BOUND = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def kernel(op: str, name: str = "triton") -> Callable[..., Any]:
    import surogate_kernels_triton

    return next(k.function for k in surogate_kernels_triton.kernels() if (k.op, k.name) == (op, name))


def check(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        error = float((a.double().cpu() - b.cpu()).norm() / b.norm().cpu().clamp(min=1e-30))
        assert error <= bound, f"tensor {number}: {error:.2e}"


def routing(tokens: int, experts: int, choices: int, device: str, *, skew: float = 0.0) -> tuple[Tensor, ...]:
    """(weights, experts, order, slot, ends); with `skew` few experts get most rows and some none."""
    logits = random(tokens, experts, seed=5) - skew * torch.arange(experts)
    return tuple(t.to(device) for t in ops.route(logits.float(), choices, True))


# --------------------------------------------------------------------------- routing


@devices
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(70, 8, 2), (1, 5, 5), (33, 128, 8), (200, 60, 6), (64, 300, 1)]
)
def test_routes(device: str, tokens: int, experts: int, choices: int, renormalise: bool) -> None:
    """The choices, their order and its inverse are the reference's; equal logits, of which bf16 has many, included."""
    logits = random(tokens, experts, dtype=torch.bfloat16).to(device)
    found = kernel("route")(logits, choices, renormalise)
    expected = ops.route(logits, choices, renormalise)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-7)
    other = kernel("route")(logits.float(), choices, renormalise)
    torch.testing.assert_close(other[0], found[0], rtol=1e-6, atol=1e-7)
    for a, b, c in zip(found[1:], expected[1:], other[1:], strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@devices
def test_ties_nan_and_one_expert_for_all(device: str) -> None:
    logits = torch.zeros(70, 40, dtype=torch.bfloat16, device=device)
    logits[1, 30] = float("nan")
    logits[2:, 7] = 100.0
    weights, experts, order, slot, ends = kernel("route")(logits, 3, True)
    assert experts[0].tolist() == [0, 1, 2]
    assert experts[1].tolist() == [0, 1, 2]
    assert weights[1].isnan().all()
    assert bool(weights[[0, *range(2, 70)]].isfinite().all())
    assert experts[2:, 0].tolist() == [7] * 68
    for a, b in zip((order, slot, ends), ops.sort_by_expert(experts, 40), strict=True):
        assert torch.equal(a, b)


@devices
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "choices"), [(70, 8, 2), (1, 5, 5), (33, 128, 6)])
def test_routes_by_sigmoids(
    device: str, tokens: int, experts: int, choices: int, corrected: bool, renormalise: bool
) -> None:
    """The correction chooses, also where it is negative, and has no part in the weights."""
    logits = random(tokens, experts).float().to(device)
    logits[0, 3] = float("nan")
    correction = 2 * random(experts, seed=1).float().to(device) - 1 if corrected else None
    named = {"sigmoid": True, "correction_E": correction, "scale": 2.5}
    leaves = [logits.detach().requires_grad_() for _ in range(2)]
    found = kernel("route")(leaves[0], choices, renormalise, **named)
    expected = ops.route(leaves[1], choices, renormalise, **named)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-7, equal_nan=True)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(a, b)
    dweights = random(tokens, choices, seed=2).float().to(device)
    a, b = (torch.autograd.grad(y[0], leaf, dweights)[0] for y, leaf in zip((found, expected), leaves, strict=True))
    assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_routes_within_groups_are_the_references() -> None:
    pytest.importorskip("triton")
    from surogate_kernels_triton import experts_routing

    logits = torch.empty(4, 16)
    assert experts_routing.route_takes(logits, 2, True, sigmoid=True)
    assert experts_routing.route_takes(logits, 2, True, groups=4, group_choices=4)
    assert not experts_routing.route_takes(logits, 2, True, groups=4, group_choices=2)


@devices
def test_the_routers_gradient(device: str) -> None:
    logits, dweights = random(40, 24, dtype=torch.bfloat16).to(device), random(40, 4, seed=1).float().to(device)
    leaves = [logits.detach().requires_grad_() for _ in range(2)]
    found = kernel("route")(leaves[0], 4, True)[0]
    expected = ops.route(leaves[1], 4, True)[0]
    a, b = (torch.autograd.grad(y, leaf, dweights)[0] for y, leaf in zip((found, expected), leaves, strict=True))
    assert torch.equal(a, b)


@devices
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize(("tokens", "choices", "outputs"), [(20, 3, 48), (1, 1, 16), (9, 8, 1500)])
def test_combine(device: str, dtype: torch.dtype, tokens: int, choices: int, outputs: int, spare: int) -> None:
    """`spare`: rows of a choice that has another one, as the places have that no row of a rank takes."""
    weights, _, order, slot, _ = routing(tokens, 10, choices, device)
    order = torch.cat((order, order[-1:].expand(spare)))
    y, dout = random(len(order), outputs, dtype=dtype), random(tokens, outputs, seed=2, dtype=dtype)
    leaves = [y.to(device).requires_grad_(), weights.clone().requires_grad_()]
    out = kernel("combine")(leaves[0], order, slot, leaves[1])
    found = [out.detach(), *torch.autograd.grad(out, leaves, dout.to(device))]
    wide = [y.double().to(device).requires_grad_(), weights.double().requires_grad_()]
    exact = ops.combine(wide[0], order, slot, wide[1])
    check(found, [exact.detach(), *torch.autograd.grad(exact, wide, dout.double().to(device))], BOUND[dtype])
    assert found[2].dtype == torch.float32


# --------------------------------------------------------------------------- products

DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float16}
"""The interpreter multiplies no matrices in bf16."""
VARIANTS = ("triton-fused", "triton-adapters")
variants = pytest.mark.parametrize("variant", VARIANTS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Projections of experts, of which a token has three."""

    projections: int = 2
    gathered: bool = True
    rank: int = 16
    tokens: int = 90
    experts: int = 7
    skew: float = 1.0
    inputs: int = 80
    outputs: int = 48
    product: Any = None
    trained: bool = False
    dropout: float = 0.0


def layer(function: Callable[..., Any], dtype: torch.dtype, device: str, **changes: Any) -> list[Tensor]:
    """y's, then the gradients of x and, with a rank, of A's and B's, and of weights that are trained."""
    case = Case(**changes)
    rank, tokens, experts, inputs, outputs = case.rank, case.tokens, case.experts, case.inputs, case.outputs
    _, _, order, slot, ends = routing(tokens, experts, 3, device, skew=case.skew)
    where = (order, slot) if case.gathered else (None, None)

    def drawn(*shape: int, seed: int, leaf: bool = True) -> Tensor:
        return random(*shape, seed=seed).bfloat16().to(device, dtype).requires_grad_(leaf)

    x = drawn(tokens if case.gathered else 3 * tokens, inputs, seed=0)
    adapters = [
        ops.ExpertAdapter(rank=rank, scale=0.5, dropout=case.dropout, salt=7 + number) if rank else None
        for number in range(case.projections)
    ]
    seed = torch.tensor(-12345, dtype=torch.int32, device=device)
    tensors, leaves = [], [x]
    for number in range(case.projections):
        tensors.append(drawn(experts, outputs, inputs, seed=10 + number, leaf=case.trained))
        leaves += tensors[-1:] if case.trained else []
        if rank:
            pair = [drawn(experts, rank, inputs, seed=20 + number), drawn(experts, outputs, rank, seed=30 + number)]
            tensors += pair
            leaves += pair
    ys = function(x, *where, ends, seed, adapters, case.product, *tensors)
    dys = [drawn(3 * tokens, outputs, seed=40 + number, leaf=False) for number in range(case.projections)]
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, leaves, dys)]


@devices
@variants
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"projections": 1, "gathered": False},
        {"gathered": False, "rank": 0},
        {"projections": 1, "rank": 0},
        {"rank": 5},
        {"rank": 32, "experts": 3},
        {"rank": 128, "experts": 3},
        {"tokens": 1},
        {"skew": 50.0},
        {"dropout": 0.3},
        {"dropout": 0.3, "projections": 1, "gathered": False},
        {"inputs": 272, "outputs": 160, "tokens": 50},
    ],
    ids=str,
)
def test_products_and_gradients(device: str, variant: str, case: dict[str, Any]) -> None:
    if variant == "triton-adapters" and case.get("rank") == 0:
        pytest.skip("it has nothing to do without adapters")
    found = layer(kernel("grouped_linears", variant), DTYPE[device], device, **case)
    expected = layer(ops.grouped_linears, torch.float64, device, **case)
    check(found, expected, BOUND[DTYPE[device]])


@devices
@pytest.mark.parametrize(("inputs", "outputs"), [(80, 48), (160, 272)])
@pytest.mark.parametrize("skew", [1.0, 50.0])
def test_plain_products_of_trained_weights(device: str, skew: float, inputs: int, outputs: int) -> None:
    """Experts without rows have gradients of zeros; gradients with other strides are read too."""
    *_, ends = routing(90, 7, 3, device, skew=skew)
    drawn = [
        random(*shape, seed=n, scale=0.3, dtype=DTYPE[device]).to(device)
        for n, shape in enumerate([(270, inputs), (7, outputs, inputs), (outputs, 270)])
    ]

    def run(function: Callable[..., Any], x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
        y = function(*leaves, ends)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.t())]

    found = run(kernel("grouped_product"), *drawn)
    check(found, run(compute.grouped_product, *(t.double() for t in drawn)), BOUND[DTYPE[device]])
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    assert skew < 10 or (counts == 0).any()
    assert not found[2][counts == 0].any()
    again = run(kernel("grouped_product"), *drawn)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def doubled(x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor) -> list[Tensor]:
    """A product such as a recipe has."""
    return [2 * compute.grouped_product(x_RI, w, ends_E) for w in weights]


@devices
@pytest.mark.parametrize(
    "case",
    [
        {"product": doubled},
        {"product": doubled, "projections": 1, "gathered": False},
        {"trained": True, "rank": 5},
        {"trained": True, "projections": 1, "gathered": False, "skew": 50.0},
    ],
    ids=["product", "product of sorted rows", "trained, rank 5", "trained, sorted rows"],
)
def test_adapters_around_any_product(device: str, case: dict[str, Any]) -> None:
    found = layer(kernel("grouped_linears", "triton-adapters"), DTYPE[device], device, **case)
    check(found, layer(ops.grouped_linears, torch.float64, device, **case), BOUND[DTYPE[device]])


@devices
def test_a_projection_without_an_adapter(device: str) -> None:
    _, _, order, slot, ends = routing(40, 5, 2, device)
    drawn = [
        random(*shape, seed=n, dtype=DTYPE[device]).to(device)
        for n, shape in enumerate([(40, 48), (5, 32, 48), (5, 64, 48), (5, 16, 48), (5, 64, 16)])
    ]
    x, first, second, a, b = drawn
    adapters = [None, ops.ExpertAdapter(rank=16, scale=0.5, dropout=0.0, salt=0)]
    rest = (order, slot, ends, None, adapters, None)
    found = kernel("grouped_linears", "triton-adapters")(x, *rest, first, second, a, b)
    wide = [t.double() for t in drawn]
    check(found, ops.grouped_linears(wide[0], *rest, *wide[1:]), BOUND[DTYPE[device]])


def refused() -> list[dict[str, Any]]:
    """Arguments that only the reference takes, or only some kernels."""
    adapter = ops.ExpertAdapter(rank=16, scale=0.5, dropout=0.0, salt=0)
    return [
        {"adapters": [adapter, replace(adapter, dropout=0.1)]},
        {"adapters": [adapter, replace(adapter, rank=8)]},
        {"adapters": [replace(adapter, rank=256)] * 2},
        {"adapters": [adapter] * 3},
    ]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("case", refused(), ids=str)
def test_what_no_kernel_takes(case: dict[str, Any]) -> None:
    from surogate_kernels_triton.experts import kernels

    offered = [k for k in kernels() if k.op == "grouped_linears"]
    adapters = case["adapters"]
    x, ends = torch.empty(20, 48, dtype=torch.bfloat16), torch.empty(5, dtype=torch.int32)
    shapes = [s for each in adapters for s in ((5, 32, 48), (5, each.rank, 48), (5, 32, each.rank))]
    tensors = [torch.empty(*shape, dtype=torch.bfloat16) for shape in shapes]
    assert not [k.name for k in offered if k.takes(x, None, None, ends, None, adapters, None, *tensors)]


@pytest.mark.parametrize(("apart", "fits"), [(0, True), (1, False), (2, True)])
def test_weights_apart_are_of_all_projections_or_none(apart: int, fits: bool) -> None:
    pytest.importorskip("triton")
    from surogate_kernels_triton import experts_frozen

    x, w, ends = torch.empty(20, 48), torch.empty(4, 32, 48), torch.empty(5)
    found = experts_frozen.takes(x, None, None, ends, None, [None] * 2, None, w, w, others=[w] * apart)
    assert found == fits


@devices
@pytest.mark.parametrize("gathered", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("tile", ["64x64x32w4s3", "64x64x32w4s3c", "128x128x64w8s3c"])
def test_every_kind_of_tile(device: str, tile: str, backward: bool, gathered: bool) -> None:
    """Tiles that the copy engine brings are those of ordinary loads; sizes that no tile divides."""
    import surogate_kernels_triton.experts_launches as launches

    _, _, order, _, ends = routing(90, 7, 3, device, skew=1.0)
    # The backward of `combined_linear` reads rows of tokens, and has one projection.
    rows, count = 270, 2 if backward and not gathered else 1
    # [E, O, I], and the inner dimension is O in the backward.
    outputs, inputs = (64, 80) if backward else (80, 64)
    inner, other = (outputs, inputs) if backward else (inputs, outputs)

    def drawn(*shape: int, seed: int) -> Tensor:
        return random(*shape, seed=seed, dtype=DTYPE[device]).to(device)

    x = [drawn(90 if gathered else rows, inner, seed=number) for number in range(count)]
    weights = [drawn(7, outputs, inputs, seed=10 + number) for number in range(count)]
    b = [drawn(7, *((16, other) if backward else (other, 16)), seed=20 + number) for number in range(count)]
    u = drawn(rows, 16 * count, seed=30)
    named = {"choices": 3, "scale": 0.5, "backward": backward, "tile": launches.Tile.of(tile)}
    found = launches.grouped_sum(x, weights, u, b, order if gathered else None, ends, rows, **named)
    expected, first = torch.zeros(rows, other, dtype=torch.float64), 0
    for number, end in enumerate(ends.tolist()):
        span = slice(first, end)
        for i in range(count):
            given = x[i][order.long() // 3] if gathered else x[i]
            w, v = (t[i][number].double().cpu() for t in (weights, b))
            low = u[span, 16 * i : 16 * (i + 1)].double().cpu()
            expected[span] += given[span].double().cpu() @ (w if backward else w.t())
            expected[span] += 0.5 * low @ (v if backward else v.t())
        first = end
    check([found], [expected], BOUND[DTYPE[device]])


@pytest.fixture
def _exact_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter rounds to FP8 in a way of its own."""
    if INTERPRETED:
        from surogate_kernels_triton import experts_launches as launches

        monkeypatch.setattr(launches, "round_rows", fp8_rows.quantise_rows)


class Rounded(Function):
    """x Wᵀ of the codes of both, and dx of the codes of dy and Wᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, sizes: tuple[int, int, int], ends: Tensor) -> Tensor:
        ctx.save_for_backward(packed, ends)
        ctx.sizes = sizes
        wide, _ = fp8_rows.packed_views(packed, *sizes)
        return fp8_rows.emulated_product(fp8_rows.quantise_rows(x), wide, ends, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        packed, ends = ctx.saved_tensors
        _, tall = fp8_rows.packed_views(packed, *ctx.sizes)
        return fp8_rows.emulated_product(fp8_rows.quantise_rows(dy), tall, ends, dy.dtype), None, None, None


def coded(*sizes: int) -> ops.CodedProduct:
    """A recipe's product of weights [E, O, I] that it packed."""

    def product(x: Tensor, weights: Sequence[Tensor], ends: Tensor) -> list[Tensor]:
        return [Rounded.apply(x, w, sizes, ends) for w in weights]  # type: ignore[no-untyped-call]

    return ops.CodedProduct(product, lambda weights: [fp8_rows.packed_views(w, *sizes) for w in weights])


def packed_layer(
    function: Callable[..., Any], dtype: torch.dtype, device: str, *, rank: int, count: int
) -> list[Tensor]:
    """As `layer`, with weights that are codes."""
    experts, outputs, inputs, gathered = 7, 256, 128, count == 2
    _, _, order, slot, ends = routing(90, experts, 3, device, skew=1.0)
    adapter = ops.ExpertAdapter(rank=rank, scale=0.5, dropout=0.0, salt=0) if rank else None

    def drawn(*shape: int, seed: int) -> Tensor:
        return random(*shape, seed=seed).bfloat16().to(device, dtype).requires_grad_()

    x, tensors, leaves = drawn(90 if gathered else 270, inputs, seed=0), [], []
    for number in range(count):
        tensors.append(fp8_rows.pack_experts(random(experts, outputs, inputs, seed=10 + number).float()).to(device))
        if rank:
            leaves += [drawn(experts, rank, inputs, seed=20 + number), drawn(experts, outputs, rank, seed=30 + number)]
            tensors += leaves[-2:]
    where = (order, slot) if gathered else (None, None)
    product = coded(experts, outputs, inputs)
    ys = function(x, *where, ends, None, [adapter] * count, product, *tensors)
    dys = [drawn(270, outputs, seed=40 + number).detach() for number in range(count)]
    dys[0][5] = 0.0  # zeros have the smallest of all scales
    return [*(y.detach() for y in ys), *torch.autograd.grad(ys, [x, *leaves], dys)]


@devices
@pytest.mark.usefixtures("_exact_rounding")
@pytest.mark.parametrize("rank", [0, 16, 128])
@pytest.mark.parametrize("count", [1, 2])
def test_codes_of_a_recipe(device: str, rank: int, count: int) -> None:
    found = packed_layer(kernel("grouped_linears", "triton-fused"), DTYPE[device], device, rank=rank, count=count)
    expected = packed_layer(ops.grouped_linears, torch.float64, device, rank=rank, count=count)
    check(found, expected, BOUND[DTYPE[device]])
    again = packed_layer(kernel("grouped_linears", "triton-fused"), DTYPE[device], device, rank=rank, count=count)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@devices
@pytest.mark.parametrize(("first", "second"), [(1.0, 1e-30), (1e-30, 1.0), (1.0, 0.0), (0.0, 1e-30), (1e-30, 1e-34)])
def test_codes_of_pairs_of_different_sizes(device: str, first: float, second: float) -> None:
    """Rows of one pair may be far smaller than those of the other."""
    from surogate_kernels_triton import experts_launches as launches

    ends = torch.tensor([9, 9, 30], dtype=torch.int32, device=device)
    x = [random(30, 128, seed=n).float() * size for n, size in enumerate((first, second))]
    weights = [random(3, 128, 128, seed=2 + n).float() for n in range(2)]
    left, right = ([fp8_rows.quantise_rows(t.to(device)) for t in both] for both in (x, weights))
    named = {"choices": 1, "scale": 1.0, "backward": True, "dtype": torch.float32}
    found = launches.grouped_codes(left, right, None, [], None, ends, 30, **named)
    expected = torch.zeros(30, 128, dtype=torch.float64)
    for (codes, inverse), (w_codes, w_inverse) in zip(left, right, strict=True):
        wide = [(c.double() * i.double()[..., None]).cpu() for c, i in ((codes, inverse), (w_codes, w_inverse))]
        expected[:9] += wide[0][:9] @ wide[1][0].t()
        expected[9:] += wide[0][9:] @ wide[1][2].t()
    top = float(expected.abs().max())
    assert float((found.cpu().double() - expected).abs().max()) <= 1e-2 * top


@devices
@pytest.mark.usefixtures("_exact_rounding")
def test_codes_of_the_last_projection(device: str) -> None:
    """The gradient of the output is rounded before it is weighted by its route, and after it in the reference."""
    experts, inputs, outputs = 6, 128, 256
    scores, _, order, slot, ends = routing(40, experts, 3, device, skew=1.0)
    packed = fp8_rows.pack_experts(random(experts, outputs, inputs, scale=0.1).float()).to(device)
    adapter = ops.ExpertAdapter(rank=16, scale=0.5, dropout=0.0, salt=3)

    def run(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [
            random(*size, seed=number, scale=0.3).bfloat16().to(device, dtype).requires_grad_()
            for number, size in enumerate([(120, inputs), (experts, 16, inputs), (experts, outputs, 16)])
        ]
        leaves.append(scores.to(torch.promote_types(dtype, torch.float32)).detach().requires_grad_())
        rest = (adapter, coded(experts, outputs, inputs), packed, *leaves[1:3])
        out = function(leaves[0], order, slot, ends, leaves[3], None, *rest)
        dout = random(40, outputs, seed=9).bfloat16().to(device, dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    found = run(kernel("combined_linear", "triton-fused"), DTYPE[device])
    expected = run(ops.combined_linear, torch.float64)
    check(found[:1], expected[:1], BOUND[DTYPE[device]])
    check(found, expected, 5e-2)


@pytest.mark.gpu
def test_rounded_rows_are_those_of_the_format() -> None:
    from surogate_kernels_triton import experts_launches as launches

    x = (random(37, 272) * torch.logspace(-20, 20, 37)[:, None]).to("cuda", torch.bfloat16)
    x[3] = 0.0
    x[4, 7], x[5, 8] = float("inf"), float("nan")
    codes, inverse = launches.round_rows(x)
    wanted, scales = fp8_rows.quantise_rows(x)
    finite = x.isfinite().all(dim=1)
    assert torch.equal(codes[finite].view(torch.uint8), wanted[finite].view(torch.uint8))
    assert torch.equal(inverse[finite], scales[finite])
    assert inverse[~finite].isnan().all()


def combined(function: Callable[..., Any], dtype: torch.dtype, device: str, *, rank: int, **shape: Any) -> list[Tensor]:
    """out, then the gradients of x, the weights of the rows and, with a rank, A and B."""
    tokens, experts, inputs, outputs = 40, 6, shape.get("inputs", 48), shape.get("outputs", 80)
    scores, _, order, slot, ends = routing(tokens, experts, 3, device, skew=shape.get("skew", 1.0))
    drawn = [
        random(*size, seed=number, scale=0.3).bfloat16().to(device, dtype)
        for number, size in enumerate(
            [(3 * tokens, inputs), (experts, outputs, inputs), (experts, rank, inputs), (experts, outputs, rank)]
        )
    ]
    x, w, *pair = drawn if rank else drawn[:2]
    dropout, seed = shape.get("dropout", 0.0), torch.tensor(77, dtype=torch.int32, device=device)
    adapter = ops.ExpertAdapter(rank=rank, scale=0.5, dropout=dropout, salt=3) if rank else None
    leaves = [t.detach().requires_grad_() for t in (x, scores.to(torch.promote_types(dtype, torch.float32)), *pair)]
    out = function(leaves[0], order, slot, ends, leaves[1], seed, adapter, None, w, *leaves[2:])
    dout = random(tokens, outputs, seed=9).bfloat16().to(device, dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@devices
@pytest.mark.parametrize(
    "case", [{"rank": 16}, {"rank": 5, "skew": 50.0}, {"rank": 0}, {"rank": 16, "inputs": 144}], ids=str
)
def test_combined_with_the_last_projection(device: str, case: dict[str, Any]) -> None:
    found = combined(kernel("combined_linear", "triton-fused"), DTYPE[device], device, **case)
    expected = combined(ops.combined_linear, torch.float64, device, **case)
    check(found, expected, BOUND[DTYPE[device]])
    assert found[2].dtype == torch.float32


@devices
@variants
@pytest.mark.parametrize("apart", [0, 1])
def test_choices_whose_rows_are_elsewhere(device: str, variant: str, apart: int) -> None:
    """Rows behind the last of an expert are NaN: nothing reads them, or what is made of them. `apart`: experts whose
    weights are in tensors of their own.
    """
    scores, experts, *_ = routing(40, 6, 3, device, skew=1.0)
    order, slot, ends = ops.sort_by_expert(torch.where(experts < 4, experts, 4), 4)
    slot, last = torch.where(experts < 4, slot, -1), int(ends[-1])
    adapter = ops.ExpertAdapter(rank=16, scale=0.5, dropout=0.0, salt=3)

    def run(dtype: torch.dtype, linears: Any, combine: Any, combined: Any) -> list[Tensor]:
        shapes = [(40, 48), (4, 80, 48), (4, 16, 48), (4, 80, 16), (4, 48, 80), (4, 16, 80), (4, 48, 16)]
        drawn = [random(*size, seed=n, scale=0.3).bfloat16().to(device, dtype) for n, size in enumerate(shapes)]
        leaves = [t.requires_grad_(t.shape[1:] not in {(80, 48), (48, 80)}) for t in drawn]
        leaves.append(scores.to(torch.promote_types(dtype, torch.float32)).detach().requires_grad_())
        (w, *others), (second, *more) = (leaves[n].split(4 - apart) if apart else [leaves[n]] for n in (1, 4))
        named = {"others": others} if apart else {}
        (h,) = linears(leaves[0], order, slot, ends, None, [adapter], None, w, *leaves[2:4], parts=True, **named)
        h = torch.where((torch.arange(len(h), device=device) < last)[:, None], h, float("nan"))
        rest = (ends, leaves[7], None, adapter, None, second, *leaves[5:7])
        named = {"others": more} if apart else {}
        found = [combined(h, order, slot, *rest, parts=True, **named), combine(h, order, slot, leaves[7], parts=True)]
        douts = [random(*t.shape, seed=9 + n).bfloat16().to(t.device, t.dtype) for n, t in enumerate(found)]
        gradients = torch.autograd.grad(found, [t for t in leaves if t.requires_grad], douts)
        return [*(t.detach() for t in found), *gradients]

    names = ("grouped_linears", variant), ("combine", "triton"), ("combined_linear", "triton-fused")
    found = run(DTYPE[device], *(kernel(*name) for name in names))
    assert found[0].dtype == found[1].dtype == torch.float32
    check(found, run(torch.float64, ops.grouped_linears, ops.combine, ops.combined_linear), BOUND[DTYPE[device]])


@devices
@variants
@pytest.mark.parametrize("rank", [16, 128])
def test_equal_inputs_give_equal_bits(device: str, variant: str, rank: int) -> None:
    sizes = {"tokens": 1500, "inputs": 1024, "outputs": 256} if device == "cuda" else {}
    run = partial(layer, kernel("grouped_linears", variant), DTYPE[device], device, rank=rank, **sizes)
    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.gpu
def test_a_captured_graph_takes_new_routes() -> None:
    """Loads change from even to all rows on three experts; no size is known to the host."""
    x, logits = (random(90, size, seed=n, dtype=torch.bfloat16).cuda() for n, size in enumerate((64, 7)))
    tensors = [
        random(7, *size, seed=n, scale=0.1, dtype=torch.bfloat16).cuda()
        for n, size in enumerate([(48, 64), (16, 64), (48, 16), (64, 48), (16, 48), (64, 16)])
    ]
    adapter = ops.ExpertAdapter(rank=16, scale=0.5, dropout=0.0, salt=0)

    def run() -> Tensor:
        with torch.no_grad():
            scores, _, order, slot, ends = kernel("route")(logits, 3, True)
            linears, last = (kernel(op, "triton-fused") for op in ("grouped_linears", "combined_linear"))
            (h,) = linears(x, order, slot, ends, None, [adapter], None, *tensors[:3])
            out: Tensor = last(h, order, slot, ends, scores, None, adapter, None, *tensors[3:])
            return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    logits[:, 4:] += 50.0
    graph.replay()
    assert torch.equal(found, run())
