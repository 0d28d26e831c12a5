"""Every elementwise op, reference and CPU kernel, against its definition in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from surogate_core.kernels import cpu, ops
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import references
from surogate_testing import op_cases
from surogate_testing.op_cases import BOUNDS, Op, compare, random, strided

EPS = 1e-6
IMPLEMENTATIONS = [
    *[("reference", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)],
    *[("torch-cpu", dtype) for dtype in (torch.float64, torch.float32)],
]
implementations = pytest.mark.parametrize(
    ("kernel", "dtype"), IMPLEMENTATIONS, ids=[f"{k}-{str(d).removeprefix('torch.')}" for k, d in IMPLEMENTATIONS]
)
LAYOUTS = {"contiguous": torch.clone, "strided": strided}


@contextmanager
def note(*case: object) -> Iterator[None]:
    """What fails within names the case."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {', '.join(map(str, case))}")
        raise


def find(name: str, kernel: str) -> Op:
    if kernel == "reference":
        return references[name].function
    (found,) = [k for k in cpu.kernels() if k.op == name]
    return found.function


def test_every_op_is_tested() -> None:
    tested = {"rms_norm", "swiglu", "rope", "norm_rope", "cross_entropy", "attention", "dropout", "adapted_linears"}
    tested |= {"geglu", "clamped_swiglu", "gated_rms_norm", "squared_relu"}
    found = {name for name, kernel in references.items() if kernel.function.__module__ == ops.__name__}
    assert found == tested, "an op without a test: add it here and to a test of this directory"
    assert {k.op for k in cpu.kernels()} <= tested


# ------------------------------------------------------------------------------ rms_norm


@implementations
def test_rms_norm(kernel: str, dtype: torch.dtype) -> None:
    """Random, huge, tiny and zero values."""
    shapes, scales = ((5, 64), (1, 1), (3, 7), (4, 3, 16)), (1.0, 1e12, 1e-12, 0.0)
    for shape, scale, layout in itertools.product(shapes, scales, LAYOUTS):
        with note(shape, scale, layout):
            x = LAYOUTS[layout](random(*shape, scale=scale, dtype=dtype))
            weight = random(shape[-1], seed=1, dtype=dtype)
            compared = compare(find("rms_norm", kernel), op_cases.rms_norm, [x, weight], EPS)
            assert compared.values[0].dtype == dtype
            # With one feature y is ±weight and dx is the rest of a difference that cancels.
            sizes = [0.0, float(weight.abs().max() / x.abs().max().clamp(min=EPS**0.5))] if shape[-1] == 1 else []
            assert compared.error(at_least=sizes) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_with_an_offset(dtype: torch.dtype) -> None:
    for shape in ((5, 64), (4, 3, 16)):
        x, weight = random(*shape, dtype=dtype), random(shape[-1], seed=1, dtype=dtype)
        compared = compare(partial(ops.rms_norm, offset=1.0), partial(op_cases.rms_norm, offset=1.0), [x, weight], EPS)
        assert compared.values[0].dtype == dtype
        assert compared.error() <= BOUNDS[dtype]
    theirs = Gemma3RMSNorm(64, EPS).to(dtype)
    x, theirs.weight.data = random(5, 64, dtype=dtype), random(64, seed=1, dtype=dtype)
    if dtype != torch.float64:  # theirs is in fp32
        assert torch.equal(ops.rms_norm(x, theirs.weight, EPS, offset=1.0), theirs(x))


@implementations
def test_rms_norm_that_is_rounded_once(kernel: str, dtype: torch.dtype) -> None:
    """To the bits of transformers' Nemotron-H in bf16, where the norm of Llama has others."""
    own = find("rms_norm", kernel)
    x, weight = random(5, 64, dtype=dtype), random(64, seed=1, dtype=dtype)
    compared = compare(partial(own, rounds_once=True), op_cases.rms_norm, [x, weight], EPS)
    assert compared.values[0].dtype == dtype
    assert compared.error() <= BOUNDS[dtype]
    if kernel == "reference" and dtype != torch.float64:  # theirs is in fp32
        theirs = NemotronHRMSNorm(64, EPS).to(dtype)
        theirs.weight.data = weight
        assert torch.equal(own(x, weight, EPS, rounds_once=True), theirs(x))
        assert torch.equal(own(x, weight, EPS), theirs(x)) == (dtype == torch.float32)


@implementations
def test_rms_norm_keeps_nan_in_its_row(kernel: str, dtype: torch.dtype) -> None:
    x = random(4, 16, dtype=dtype)
    x[2, 3] = float("nan")
    y = find("rms_norm", kernel)(x, torch.ones(16, dtype=dtype), EPS)
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


@implementations
def test_rms_norm_of_a_frozen_weight_gives_no_weight_gradient(kernel: str, dtype: torch.dtype) -> None:
    x, weight = random(4, 16, dtype=dtype).requires_grad_(), random(16, seed=1, dtype=dtype)
    (dx,) = torch.autograd.grad(find("rms_norm", kernel)(x, weight, EPS).sum(), [x])
    trained = weight.clone().requires_grad_()
    expected, _ = torch.autograd.grad(find("rms_norm", kernel)(x, trained, EPS).sum(), [x, trained])
    assert torch.equal(dx, expected)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("gate_first", [False, True], ids=["norm-first", "gate-first"])
def test_gated_rms_norm(dtype: torch.dtype, gate_first: bool) -> None:
    """Random, large, tiny and zero values, and one group or several."""
    cases = itertools.product(((5, 48), (4, 3, 16)), (1, 2, 8), (1.0, 1e4, 1e-12, 0.0), LAYOUTS)
    for shape, groups, scale, layout in cases:
        with note(shape, groups, scale, layout):
            x = LAYOUTS[layout](random(*shape, scale=scale, dtype=dtype))
            gate = LAYOUTS[layout](random(*shape, seed=2, scale=4.0, dtype=dtype))
            weight = random(shape[-1], seed=1, dtype=dtype)
            own, definition = (
                partial(op, eps=EPS, groups=groups, gate_first=gate_first)
                for op in (ops.gated_rms_norm, op_cases.gated_rms_norm)
            )
            compared = compare(own, definition, [x, gate, weight])
            assert compared.values[0].dtype == dtype
            assert compared.error() <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_gated_rms_norm_has_the_bits_of_transformers(family: str, dtype: torch.dtype) -> None:
    if family == "qwen3_5":
        theirs, settings = Qwen3_5RMSNormGated(48, EPS), {}
    elif hasattr(nemotron_h, "NemotronHRMSNormGated"):
        theirs, settings = nemotron_h.NemotronHRMSNormGated(48, 48 // 3, EPS), {"groups": 3, "gate_first": True}
    else:
        pytest.skip("this version of transformers has no module of its own for Nemotron-H's gated norm")
    x, gate, weight = random(5, 48, dtype=dtype), random(5, 48, seed=1, dtype=dtype), random(48, seed=2, dtype=dtype)
    theirs.weight.data = weight
    assert torch.equal(ops.gated_rms_norm(x, gate, weight, EPS, **settings), theirs(x, gate))


@pytest.mark.parametrize("gate_first", [False, True], ids=["norm-first", "gate-first"])
def test_gated_rms_norm_of_a_frozen_weight_gives_no_weight_gradient(gate_first: bool) -> None:
    x, gate, weight = (random(4, 16, seed=s).requires_grad_(s < 2) for s in range(3))
    weight = weight[0]
    y = ops.gated_rms_norm(x, gate, weight, EPS, gate_first=gate_first)
    dx, dgate = torch.autograd.grad(y.sum(), [x, gate])
    weight.requires_grad_()
    y = ops.gated_rms_norm(x, gate, weight, EPS, gate_first=gate_first)
    expected = torch.autograd.grad(y.sum(), [x, gate, weight])
    assert torch.equal(dx, expected[0])
    assert torch.equal(dgate, expected[1])


# ----------------------------------------------------------------------------- norm_rope


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norm_rope_is_a_norm_and_a_rotation(dtype: torch.dtype) -> None:
    q, k, v = (random(7, heads, 8, seed=heads, dtype=dtype) for heads in (4, 2, 3))
    weights = [random(8, seed=s, dtype=dtype) for s in (5, 6)]
    angles = random(7, 4, seed=7)
    cos, sin = (t.to(torch.promote_types(dtype, torch.float32)) for t in (angles.cos(), angles.sin()))
    leaves = [t.requires_grad_() for t in (q, k, v, *weights)]
    found = ops.norm_rope(*leaves, EPS, cos, sin)
    expected = [ops.rope(ops.rms_norm(x, w, EPS), cos, sin) for x, w in zip(leaves, weights, strict=False)]
    dys = [torch.randn_like(t) for t in found]
    assert all(torch.equal(a, b) for a, b in zip(found, [*expected, v], strict=True))
    grads = torch.autograd.grad(found, leaves, dys)
    again = torch.autograd.grad([*expected, v * 1], leaves, dys)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


# ----------------------------------------------------------------------- adapted_linears


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_adapted_linears_are_projections_with_adapters(dtype: torch.dtype, dropout: float) -> None:
    shape = PanelShape(inputs=32, outputs=(16, 48), rank=16, scale=0.75, dropout=dropout, salts=(3, 1))
    seed, before = torch.tensor([-9, 4], dtype=torch.int32), 4
    panel = shape.allocate(torch.device("cpu"), dtype)
    x, adapters, expected = random(5, 32, dtype=dtype).requires_grad_(), [], []
    for number, outputs in enumerate(shape.outputs):
        weight = random(outputs, 32, seed=number + 1, dtype=dtype)
        shape.weight(panel, number).copy_(weight)
        a, b = random(16, 32, seed=number + 5, dtype=dtype), random(outputs, 16, seed=number + 7, dtype=dtype)
        adapters += [a.requires_grad_(), b.requires_grad_()]
        mask = ops.dropout_mask(torch.Size((before + 5, 32)), seed[0], salt=shape.salts[number], p=dropout)[before:]
        dropped = x * mask / (1 - dropout)
        expected.append(x @ weight.t() + 0.75 * dropped @ a.t() @ b.t())
    found = references["adapted_linears"].function(x, panel, seed, shape, *adapters)
    dys = [torch.randn_like(y) for y in found]
    values = [*found, *torch.autograd.grad(found, [x, *adapters], dys)]
    wanted = [*expected, *torch.autograd.grad(expected, [x, *adapters], dys)]
    for a, b in zip(values, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_panels_fit_tensor_cores() -> None:
    shape = PanelShape(inputs=32, outputs=(16, 48), rank=16, scale=1.0, dropout=0.0, salts=(0, 1))
    assert shape.fits
    assert shape.allocate(torch.device("meta"), torch.bfloat16).shape == (96, 64)
    assert not replace(shape, rank=8).fits
    assert replace(shape, rank=128).fits
    assert not replace(shape, rank=48).fits, "kernels have powers of two"
    assert not replace(shape, rank=256).fits
    assert not replace(shape, outputs=(16, 40)).fits
    assert not replace(shape, outputs=(16,) * 5).fits


# -------------------------------------------------------------------------------- swiglu


@implementations
def test_swiglu(kernel: str, dtype: torch.dtype) -> None:
    """Random, huge, tiny and zero values."""
    shapes, scales = ((5, 48), (1, 1), (3, 7)), (1.0, 1e15, 1e-15, 0.0)
    for shape, scale, layout in itertools.product(shapes, scales, LAYOUTS):
        gate, up = (LAYOUTS[layout](random(*shape, seed=s, scale=scale, dtype=dtype)) for s in (0, 1))
        # The definition's exp overflows; at such sizes silu is a ramp.
        definition = op_cases.swiglu if scale < 1e15 else lambda g, u: g.clamp(min=0) * u
        with note(shape, scale, layout):
            assert compare(find("swiglu", kernel), definition, [gate, up]).error() <= BOUNDS[dtype]


@implementations
def test_swiglu_over_the_whole_range_of_the_exponent(kernel: str, dtype: torch.dtype) -> None:
    gate = torch.linspace(-120, 120, 97, dtype=torch.float64).to(dtype)[None]
    up = torch.ones_like(gate)
    assert compare(find("swiglu", kernel), op_cases.swiglu, [gate, up]).error() <= BOUNDS[dtype]


@implementations
def test_swiglu_keeps_nan_where_it_is(kernel: str, dtype: torch.dtype) -> None:
    gate, up = random(3, 5, dtype=dtype), random(3, 5, seed=1, dtype=dtype)
    gate[0, 1], up[2, 4] = float("nan"), float("nan")
    y = find("swiglu", kernel)(gate, up)
    assert y.isnan().nonzero().tolist() == [[0, 1], [2, 4]]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_geglu(dtype: torch.dtype) -> None:
    """Random, huge, tiny and zero values."""
    for shape, scale, layout in itertools.product(((5, 48), (1, 1), (3, 7)), (1.0, 1e8, 1e-15, 0.0), LAYOUTS):
        gate, up = (LAYOUTS[layout](random(*shape, seed=s, scale=scale, dtype=dtype)) for s in (0, 1))
        with note(shape, scale, layout):
            assert compare(find("geglu", "reference"), op_cases.geglu, [gate, up]).error() <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    """Values of which some are limited, most are, and none is."""

    def limited(function: Op, limit: float, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return function(gate, up, limit, 1.702)

    for limit, layout in itertools.product((0.7, 0.05, 7.0), LAYOUTS):
        gate, up = (LAYOUTS[layout](random(5, 48, seed=s, dtype=dtype)) for s in (0, 1))
        own, definition = (
            partial(limited, function, limit)
            for function in (find("clamped_swiglu", "reference"), op_cases.clamped_swiglu)
        )
        with note(limit, layout):
            assert compare(own, definition, [gate, up]).error() <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_squared_relu(dtype: torch.dtype) -> None:
    """Random, large, tiny and zero values."""
    for shape, scale, layout in itertools.product(((5, 48), (1, 1), (3, 7)), (1.0, 1e8, 1e-15, 0.0), LAYOUTS):
        x = LAYOUTS[layout](random(*shape, scale=scale, dtype=dtype))
        with note(shape, scale, layout):
            assert compare(ops.squared_relu, op_cases.squared_relu, [x]).error() <= BOUNDS[dtype]


# ---------------------------------------------------------------------------------- rope


def turned(op: Op, cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return op(x, cos, sin)


@implementations
def test_rope(kernel: str, dtype: torch.dtype) -> None:
    """Random, huge, tiny and zero values. The tables get no gradient."""
    shapes, scales = ((7, 3, 16), (1, 1, 2), (5, 2, 6)), (1.0, 1e15, 1e-15, 0.0)
    for shape, scale, layout in itertools.product(shapes, scales, LAYOUTS):
        x = LAYOUTS[layout](random(*shape, scale=scale, dtype=dtype))
        angles = random(shape[0], shape[2] // 2, seed=1, scale=3.0)
        cos, sin = angles.cos().float(), angles.sin().float()
        with note(shape, scale, layout):
            sides = [partial(turned, op, cos, sin) for op in (find("rope", kernel), op_cases.rope)]
            compared = compare(*sides, [x])
            assert compared.error() <= BOUNDS[dtype]


@implementations
def test_rope_turns_pairs_without_changing_their_length(kernel: str, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, 4, dtype=dtype)
    x[0, 0, 1] = 1
    angle = torch.tensor([[0.0, torch.pi / 2]])
    y = find("rope", kernel)(x, angle.cos(), angle.sin())
    torch.testing.assert_close(y, torch.tensor([[[0, 0, 0, 1.0]]]).to(dtype), atol=1e-6, rtol=0)


# ------------------------------------------------------------------------- cross_entropy


@implementations
def test_cross_entropy(kernel: str, dtype: torch.dtype) -> None:
    """Random, huge, tiny and zero values."""
    for vocab, scale, layout in itertools.product((61, 1, 2), (1.0, 1e4, 1e-8, 0.0), LAYOUTS):
        logits = LAYOUTS[layout](random(9, vocab, scale=scale, dtype=dtype))
        labels = torch.randint(0, vocab, (9,), generator=torch.Generator().manual_seed(2))
        labels[[0, 4, 8]] = -100
        with note(vocab, scale, layout):
            compared = compare(find("cross_entropy", kernel), op_cases.cross_entropy, [logits, labels])
            loss = compared.values[0]
            assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert (loss[[0, 4, 8]] == 0).all()
            assert (compared.values[1][[0, 4, 8]] == 0).all()
            # Fp32 logits of 1e4 hold six digits, so a softmax over them holds about three.
            assert compared.error() <= (1e-3 if scale == 1e4 and dtype == torch.float32 else BOUNDS[dtype])


@implementations
def test_cross_entropy_with_every_label_ignored(kernel: str, dtype: torch.dtype) -> None:
    logits = random(6, 11, dtype=dtype).requires_grad_()
    loss = find("cross_entropy", kernel)(logits, torch.full((6,), -100))
    loss.sum().backward()
    assert (loss == 0).all()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


@implementations
def test_cross_entropy_of_masked_out_logits(kernel: str, dtype: torch.dtype) -> None:
    """−∞ in columns that are not the label: probability and gradient 0."""
    logits = random(3, 7, dtype=dtype)
    logits[:, 5] = float("-inf")
    labels = torch.tensor([0, 6, 2])
    logits.requires_grad_()
    loss = find("cross_entropy", kernel)(logits, labels)
    loss.sum().backward()
    kept = torch.cat((logits.detach()[:, :5], logits.detach()[:, 6:]), dim=1).double()
    expected = torch.nn.functional.cross_entropy(kept, torch.tensor([0, 5, 2]), reduction="none")
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[:, 5] == 0).all()


@implementations
def test_cross_entropy_keeps_nan_in_its_row(kernel: str, dtype: torch.dtype) -> None:
    logits = random(4, 9, dtype=dtype)
    logits[1, 2] = float("nan")
    logits[3, 2] = float("nan")
    labels = torch.tensor([3, 3, 3, -100])
    logits.requires_grad_()
    loss = find("cross_entropy", kernel)(logits, labels)
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False, False]
    assert logits.grad is not None
    assert logits.grad[1].isnan().any()
    assert logits.grad[[0, 2]].isfinite().all()


# ------------------------------------------------------------------------------- dropout


def seed_of(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int32)


SEEDS = [0, 1, 2, -1, 2**31 - 1, -(2**31), 123_456_789]


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_dropout_rate(p: float) -> None:
    """Over 1.4e7 draws, and over each seed's 2e6: within 4 standard deviations."""
    count = 2_000_000
    dropped = []
    for seed in SEEDS:
        mask = ops.dropout_mask(torch.Size((count // 100, 100)), seed_of(seed), salt=3, p=p)
        dropped.append(count - int(mask.sum()))
    sigma = (count * p * (1 - p)) ** 0.5
    assert all(abs(d - count * p) <= 4 * sigma for d in dropped), [(d - count * p) / sigma for d in dropped]
    assert abs(sum(dropped) - len(SEEDS) * count * p) <= 4 * sigma * len(SEEDS) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor, p: float) -> float:
    """In standard deviations of that of independent masks."""
    drops = [(~x).double() - p for x in (a.flatten(), b.flatten())]
    return float((drops[0] * drops[1]).sum() / (len(drops[0]) ** 0.5 * p * (1 - p)))


def test_dropout_masks_of_salts_seeds_and_neighbours_are_independent() -> None:
    """Pairs of masks agree as often as chance has it: 5 deviations bound the hundred pairs."""
    p, shape = 0.1, torch.Size((1000, 512))
    masks = [ops.dropout_mask(shape, seed_of(s), salt=salt, p=p) for s in (7, 8, -7) for salt in (0, 1, 2, 6)]
    # Seeds as the engine draws them for layers, steps and micro-steps that follow each other.
    from tiny_qwen3 import make_engine

    engine = make_engine()
    engine_seeds = [s for step, micro in ((0, 0), (0, 1), (1, 0)) for s in engine.seeds(step, micro)[:, 0]]
    assert len({int(s) for s in engine_seeds}) == len(engine_seeds)
    masks += [ops.dropout_mask(shape, s, salt=0, p=p) for s in engine_seeds]
    pairs = [correlation(a, b, p) for a, b in itertools.combinations(masks, 2)]
    assert max(map(abs, pairs)) <= 5
    for mask in masks:
        for shift in (1, 2, 16, 512, 513):
            flat = mask.flatten()
            assert abs(correlation(flat[shift:], flat[:-shift], p)) <= 5
        # No row and no column is dropped more than others.
        for dim, n in ((0, shape[0]), (1, shape[1])):
            drops = (~mask).sum(dim).double()
            assert ((drops - n * p).abs() / (n * p * (1 - p)) ** 0.5).max() <= 6


def test_dropout_mask_depends_on_nothing_but_its_key() -> None:
    first = ops.dropout_mask(torch.Size((33, 7)), seed_of(5), salt=2, p=0.3)
    torch.rand(10)
    assert torch.equal(ops.dropout_mask(torch.Size((231,)), seed_of(5), salt=2, p=0.3).view(33, 7), first)
    assert not torch.equal(ops.dropout_mask(torch.Size((33, 7)), seed_of(6), salt=2, p=0.3), first)
    assert not torch.equal(ops.dropout_mask(torch.Size((33, 7)), seed_of(5), salt=3, p=0.3), first)


def test_dropout_masks_are_what_they_were() -> None:
    """A resumed run must draw the masks of the one that was stopped, also after an upgrade."""

    def hash32(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D & 0xFFFFFFFF
        x ^= x >> 15
        x = x * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    for seed, salt in ((0, 0), (123_456_789, 6), (-5, 40)):
        key = hash32(seed + salt * 0x1E3779B9 & 0xFFFFFFFF)
        signed = [((hash32(i ^ key) + (1 << 31)) % (1 << 32)) - (1 << 31) for i in range(64)]
        expected = [value >= round(0.3 * 2**32) - 2**31 for value in signed]
        assert ops.dropout_mask(torch.Size((64,)), seed_of(seed), salt=salt, p=0.3).tolist() == expected


def test_dropout_masks_of_rows_are_parts_of_one_mask() -> None:
    whole = ops.dropout_mask(torch.Size((48, 7)), seed_of(5), salt=2, p=0.3)
    for first, last in ((0, 48), (0, 16), (16, 48), (47, 48)):
        seed = torch.tensor([5, first], dtype=torch.int32)
        part = ops.dropout_mask_of_rows(torch.empty(last - first, 7), seed, salt=2, p=0.3)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dropout_forward_and_backward_use_one_mask(dtype: torch.dtype) -> None:
    x = strided(random(40, 30, dtype=dtype)).requires_grad_()
    y = ops.dropout(x, torch.tensor([3, 0], dtype=torch.int32), 1, 0.25)
    mask = ops.dropout_mask(x.shape, seed_of(3), salt=1, p=0.25)
    expected = torch.where(mask, x.detach().double() / 0.75, 0.0)
    assert (y.detach().double() - expected).abs().max() <= BOUNDS[dtype] * expected.abs().max()
    dy = random(40, 30, seed=2, dtype=dtype)
    (dx,) = torch.autograd.grad(y, [x], dy)
    wanted = torch.where(mask, dy.double() / 0.75, 0.0)
    assert (dx.double() - wanted).abs().max() <= BOUNDS[dtype] * wanted.abs().max()
    assert not torch.equal(mask, torch.ones_like(mask))
