"""FP8 products of adapted projections with a Hopper: codes and largest values bit for bit, sums within rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import surogate_kernels_hopper
import torch
from torch import Tensor

from surogate_core.plugin import compute
from surogate_core.plugin import fp8 as scaled
from surogate_testing.op_cases import random

pytestmark = pytest.mark.gpu
BOUND = 8e-3
"""‖error‖ / ‖value‖: results are rounded to bf16, and the tensor cores keep fewer bits of an FP8 sum than fp32 has."""
SHAPES = {
    "three": compute.PanelShape(
        inputs=256, outputs=(512, 256, 256), rank=16, scale=2.0, dropout=0.0, salts=(0, 1, 2), frozen=False
    ),
    "two": compute.PanelShape(
        inputs=512, outputs=(768, 768), rank=32, scale=0.7, dropout=0.0, salts=(4, 5), frozen=False
    ),
    "one": compute.PanelShape(inputs=1280, outputs=(256,), rank=16, scale=1.0, dropout=0.0, salts=(3,), frozen=False),
}
Run = Callable[..., Sequence[Tensor]]


@pytest.fixture
def linears() -> Run:
    device = torch.device("cuda")
    if reason := surogate_kernels_hopper.unavailable(device):
        pytest.skip(reason)
    pytest.importorskip("triton")
    return next(k for k in surogate_kernels_hopper.kernels() if k.op == "scaled_linears").function


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
    from surogate_kernels_hopper.scaled import quantised

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


def run(
    function: Run, shape: compute.PanelShape, tokens: int, delayed: bool, seed: Tensor | None = None
) -> list[Tensor]:
    """Outputs, then gradients of x, the rows and the adapters."""
    x, panel, weights, rows, adapters = material(shape, tokens, delayed)
    dys = [random(tokens, o, seed=40 + i, scale=10.0**-i).bfloat16().cuda() for i, o in enumerate(shape.outputs)]
    leaves = [x.requires_grad_(), *rows, *(a.requires_grad_() for a in adapters)]
    outputs = function(x, panel, seed, shape, 0, weights, rows, *adapters)
    return [t.detach() for t in (*outputs, *torch.autograd.grad(outputs, leaves, dys))]


def material(
    shape: compute.PanelShape, tokens: int, delayed: bool
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """x, the panel, packed weights, rows of scales and adapters."""
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
    return x, panel, weights, rows, adapters


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [128, 1792])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_products_and_gradients_are_the_references(
    linears: Run, name: str, tokens: int, delayed: bool, dropout: float
) -> None:
    shape = replace(SHAPES[name], dropout=dropout)
    seed = torch.tensor([7, 300], dtype=torch.int32, device="cuda")
    found = run(linears, shape, tokens, delayed, seed)
    expected = run(compute.references["scaled_linears"].function, shape, tokens, delayed, seed)
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


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("tokens", [16, 128, 500, 600])
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, (256, 512)), (1024, (512, 256)), (256, (12288, 12288))])
def test_products_of_few_rows_are_the_references(
    linears: Run, inputs: int, outputs: tuple[int, ...], tokens: int, delayed: bool
) -> None:
    """With blocks of which two share a tile, with smaller ones, and with the usual ones; 600 rows are not few."""
    shape = replace(SHAPES["one"], inputs=inputs, outputs=outputs, salts=tuple(range(len(outputs))), scale=0.7)
    with torch.no_grad():
        x, panel, weights, rows, adapters = material(shape, tokens, delayed)
        runs = [linears(x, panel, None, shape, 0, weights, rows, *adapters) for _ in range(3)]
        expected = compute.references["scaled_linears"].function(x, panel, None, shape, 0, weights, rows, *adapters)
    for found, other, third, value in zip(*runs, expected, strict=True):
        assert torch.equal(found, other)
        assert torch.equal(found, third)
        error = float((found.double() - value.double()).norm() / value.double().norm())
        assert error <= BOUND, f"{error:.2e}"
