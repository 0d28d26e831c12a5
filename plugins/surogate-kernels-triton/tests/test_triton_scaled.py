"""FP8 products of adapted projections with a Hopper: codes and largest values bit for bit, sums within rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import surogate_kernels_triton
import torch
from op_cases import random
from torch import Tensor, fx

from surogate_core.dsl import trace
from surogate_core.dsl.trace import Signature
from surogate_core.kernels import ops, registry, scaled
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import KernelTable, references

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
