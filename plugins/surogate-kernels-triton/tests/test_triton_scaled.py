"""FP8 products of adapted projections with a Hopper: codes and largest values bit for bit, sums within rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import surogate_kernels_triton
import torch
from torch import Tensor, fx

from surogate_core.dsl import trace
from surogate_core.dsl.trace import Signature
from surogate_core.formats import fp8 as scaled
from surogate_core.kernels import ops, registry
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import KernelTable, references
from surogate_core.testing.op_cases import random

pytestmark = pytest.mark.gpu
BOUND = 8e-3
"""‖error‖ / ‖value‖: results are rounded to bf16, and the tensor cores keep fewer bits of an FP8 sum than fp32 has."""
SHAPES = {
    "three": PanelShape(
        inputs=256, outputs=(512, 256, 256), rank=16, scale=2.0, dropout=0.0, salts=(0, 1, 2), frozen=False
    ),
    "two": PanelShape(inputs=512, outputs=(768, 768), rank=32, scale=0.7, dropout=0.0, salts=(4, 5), frozen=False),
    "one": PanelShape(inputs=1280, outputs=(256,), rank=16, scale=1.0, dropout=0.0, salts=(3,), frozen=False),
}
Run = Callable[..., Sequence[Tensor]]


@pytest.fixture
def linears() -> Run:
    device = torch.device("cuda")
    if reason := surogate_kernels_triton.unavailable(device):
        pytest.skip(reason)
    kernel = next(k for k in surogate_kernels_triton.kernels() if k.op == "scaled_linears")
    if not kernel.supports(device, torch.bfloat16):
        pytest.skip("the kernels are for Hopper")
    return kernel.function


def values(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    x = random(rows, columns, seed=seed).bfloat16().cuda()
    match kind:
        case "huge":
            return x * 1e30
        case "tiny":
            return x * 1e-30
        case "zero":
            return x * 0
        case "infinite":
            x[3, 5], x[rows - 1, columns - 1] = -torch.inf, torch.inf
        case "nan":
            x[rows - 2, 7] = torch.nan
    return x


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "zero", "infinite", "nan"])
def test_codes_and_largest_values_are_the_references(linears: Run, kind: str, delayed: bool, gradient: bool) -> None:
    from surogate_kernels_triton.scaled import quantised

    widths, n = [256, 128, 384], 256
    room = torch.nn.functional.pad(values(n, sum(widths), kind, seed=1), (0, 128), value=9e9)
    role = scaled.GRADIENT if gradient else scaled.ACTIVATION
    format = scaled.E5M2 if gradient else scaled.E4M3
    rows = [torch.zeros(3, device="cuda") for _ in widths]
    if delayed:
        for number, row in enumerate(rows):
            row[role] = 3.7 * (number + 1)
    flat, figures = quantised(room, rows, widths, 1, gradient=gradient)
    codes = scaled.untiled(flat, n, sum(widths)).view(format).float().split(widths, dim=1)
    for found, x, row, (scale, inverse, largest, _) in zip(
        codes, room[:, : sum(widths)].split(widths, dim=1), rows, figures, strict=True
    ):
        amax = scaled.amax_of(x)
        used = scaled.scale_in_use(row, role, amax, format, 1)
        assert torch.equal(scale, used)
        assert torch.equal(inverse, 1 / used)
        torch.testing.assert_close(largest, amax, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found, scaled.quantise(x, used, format).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("linears")
@pytest.mark.parametrize("role", [scaled.ACTIVATION, scaled.WEIGHT, scaled.GRADIENT])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "subnormal", "zero", "infinite", "nan"])
def test_codes_of_both_layouts_are_the_references(kind: str, delayed: bool, role: int) -> None:
    from surogate_kernels_triton.quantise_both import quantise_both

    room = torch.nn.functional.pad(values(384, 640, kind, seed=2), (8, 0), value=9e9)
    if kind == "subnormal":
        room = (room.double() * 1e-39).bfloat16()
    row = torch.tensor([3.7, 9e3, 1e30 if kind == "subnormal" else 0.2], device="cuda") * delayed
    # A view of columns, a transpose, and one that begins off the alignment of a load.
    for x in (room[:, 8:], room[:, 8:].contiguous().t(), room[:, 7:-1]):
        found = quantise_both(x, row, role, 1)
        expected = references["quantise_both"].function(x, row, role, 1)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert a.is_contiguous()
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("linears")
def test_what_does_not_fill_tiles_is_left_to_the_reference() -> None:
    pack = surogate_kernels_triton.surogate_kernel_pack()
    table = KernelTable.build(torch.device("cuda"), [pack])
    for shape, name in (((256, 384), "triton"), ((256, 320), "reference"), ((130, 256), "reference")):
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        assert table.choose("quantise_both", x.dtype, x, x[0], scaled.WEIGHT, 0).name == name


def run(function: Run, shape: PanelShape, tokens: int, delayed: bool, seed: Tensor | None = None) -> list[Tensor]:
    """Outputs, then gradients of x, the rows and the adapters."""
    x = random(tokens, shape.inputs, seed=0).bfloat16().cuda()
    panel = shape.allocate(x.device, x.dtype)
    adapters, weights, rows = [], [], []
    for number, outputs in enumerate(shape.outputs):
        weight = random(outputs, shape.inputs, seed=10 + number, scale=(number + 1) * shape.inputs**-0.5)
        weights.append(scaled.pack(weight.bfloat16().cuda(), 0))
        a = random(shape.rank, shape.inputs, seed=20 + number, scale=shape.inputs**-0.5)
        adapters += [t.bfloat16().float().cuda() for t in (a, random(outputs, shape.rank, seed=30 + number))]
        scales = [100.0, 1.0, 5000.0 * 3**number] if delayed else [0.0] * 3
        rows.append(torch.tensor(scales, device="cuda", requires_grad=True))
    shape.load(panel, list(zip(adapters[::2], adapters[1::2], strict=True)))
    dys = [random(tokens, o, seed=40 + i, scale=10.0**-i).bfloat16().cuda() for i, o in enumerate(shape.outputs)]
    leaves = [x.requires_grad_(), *rows, *(a.requires_grad_() for a in adapters)]
    outputs = function(x, panel, seed, shape, 0, weights, rows, *adapters)
    return [t.detach() for t in (*outputs, *torch.autograd.grad(outputs, leaves, dys))]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [128, 1792])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_products_and_gradients_are_the_references(
    linears: Run, name: str, tokens: int, delayed: bool, dropout: float
) -> None:
    shape = replace(SHAPES[name], dropout=dropout)
    seed = torch.tensor(7, dtype=torch.int32, device="cuda")
    found = run(linears, shape, tokens, delayed, seed)
    expected = run(references["scaled_linears"].function, shape, tokens, delayed, seed)
    slots = len(shape.outputs)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        if slots < number <= 2 * slots:  # what the rows observe
            assert torch.equal(a, b)
        else:
            error = float((a.double() - b.double()).norm() / b.double().norm())
            assert error <= BOUND, f"tensor {number}: {error:.2e}"


def test_equal_inputs_give_equal_bits(linears: Run) -> None:
    runs = [run(linears, SHAPES["three"], 2048, True) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


# --------------------------------------------------------------------------- SwiGLU within


UP = PanelShape(inputs=256, outputs=(512, 512), rank=16, scale=2.0, dropout=0.0, salts=(0, 1), frozen=False)
DOWN = PanelShape(inputs=512, outputs=(256,), rank=16, scale=2.0, dropout=0.0, salts=(2,), frozen=False)


def feed_forward(x: Tensor, seed: Tensor, up: Tensor, down: Tensor, *rest: Tensor) -> Tensor:
    weights, (rows, *adapters) = rest[:3], rest[3:]
    first, second, third = rows.unbind(0)
    gate, value = scaled.scaled_linears(x, up, seed, UP, 0, weights[:2], (first, second), *adapters[:4])
    h = ops.swiglu(gate, value)
    return x + scaled.scaled_linears(h, down, seed, DOWN, 0, weights[2:], (third,), *adapters[4:])[0]


def feed_forward_arguments(delayed: bool) -> list[Tensor]:
    panels, weights, adapters = [], [], []
    for shape in (UP, DOWN):
        panel = shape.allocate(torch.device("cuda"), torch.bfloat16)
        own = []
        for number, outputs in enumerate(shape.outputs):
            weight = random(outputs, shape.inputs, seed=len(weights), scale=shape.inputs**-0.5)
            weights.append(scaled.pack(weight.bfloat16().cuda(), 0))
            a = random(shape.rank, shape.inputs, seed=20 + number, scale=shape.inputs**-0.5)
            own += [t.bfloat16().float().cuda() for t in (a, random(outputs, shape.rank, seed=30, scale=0.1))]
        shape.load(panel, list(zip(own[::2], own[1::2], strict=True)))
        panels.append(panel)
        adapters += own
    rows = torch.tensor([[90.0, 1.0, 4000.0], [90.0, 1.0, 3000.0], [120.0, 1.0, 9000.0]], device="cuda")
    x = random(768, 256, seed=9).bfloat16().cuda()
    seed = torch.zeros((), dtype=torch.int32, device="cuda")
    return [x, seed, *panels, *weights, rows if delayed else torch.zeros_like(rows), *adapters]


@pytest.mark.usefixtures("linears")
@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "zero", "infinite", "nan"])
@pytest.mark.parametrize(("tokens", "features"), [(128, 256), (4096, 2560), (1920, 768)])
def test_codes_of_a_gated_backward_are_those_of_its_rows(tokens: int, features: int, kind: str) -> None:
    """Blocks of one step, of many, and of some that begin within a tile; the parts of the sums are the same bits."""
    from surogate_kernels_triton import adapters, gated, scaled_gated

    joined = values(tokens, 2 * features, kind, seed=1)
    dh = random(tokens, features, seed=2).bfloat16().cuda()
    u, b, du = (random(*s, seed=3).bfloat16().cuda() for s in ((tokens, 32), (2 * features, 32), (tokens, 16)))
    dy = dh.new_zeros(tokens, 2 * features + adapters.ROOM)
    codes = torch.zeros(tokens * 2 * features, dtype=torch.uint8, device="cuda")
    figures = torch.tensor([[300.0, 1 / 300.0, 0.0, 0.0], [2e3, 5e-4, 0.0, 0.0]], device="cuda")
    operands = dh, joined[:, :features], joined[:, features:], u, b, du, gated.SHARED["gated_backward"]
    rows = gated.launch(gated.ROWS, "gated_backward", (dy, dy.stride(0)), *operands)
    found = gated.launch(scaled_gated.CODES, "gated_codes", (codes, figures), *operands)
    for a, c in zip(rows, found, strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=0, equal_nan=True)
    made = scaled.untiled(codes, tokens, 2 * features).view(scaled.E5M2).float()
    for half, own, (scale, _, largest, _) in zip(
        dy[:, : 2 * features].split(features, dim=1), made.split(features, dim=1), figures, strict=True
    ):
        expected = scaled.quantise(half, scale, scaled.E5M2).float()
        torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(largest, scaled.amax_of(half), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("linears")
@pytest.mark.parametrize("delayed", [False, True])
def test_a_rewritten_graph_gives_the_same(delayed: bool) -> None:
    arguments = feed_forward_arguments(delayed)
    inputs = [Signature.of(t, requires_grad=i == 0 or i > 6) for i, t in enumerate(arguments)]
    values = []
    for rewritten in (True, False):
        table = KernelTable.build(torch.device("cuda"), [surogate_kernels_triton.surogate_kernel_pack()])
        if not rewritten:
            table.rewrites = ()
        with registry.using(table):
            joint = trace.trace_joint(feed_forward, inputs)
        names = {str(n.target) for n in joint.graph.nodes}
        fused = {
            f"surogate_triton.{n}.default" for n in ("scaled_gated", "scaled_down_backward", "scaled_gated_backward")
        }
        assert names.isdisjoint(fused) != rewritten
        assert ("surogate_triton.swiglu_backward.default" in names) != rewritten
        values.append(fx.Interpreter(joint).run(*arguments, random(768, 256, seed=3).bfloat16().cuda()))
    assert len(values[0]) == 2 + 1 + 6
    for number, (found, expected) in enumerate(zip(*values, strict=True)):
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        assert error <= 2 * BOUND, f"tensor {number}: {error:.2e}"
