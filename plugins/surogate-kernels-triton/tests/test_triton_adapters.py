"""LoRA on panels with a GPU: against the reference in float64, and against itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import surogate_kernels_triton
import torch
from torch import Tensor

from surogate_core.plugin import compute
from surogate_testing.op_cases import random

pytestmark = pytest.mark.gpu
BOUND = 1.5e-2
"""‖error‖ / ‖value‖: u, du and results are rounded to bf16."""
SHAPES = {
    "wide": compute.PanelShape(inputs=128, outputs=(256, 64, 64), rank=16, scale=2.0, dropout=0.0, salts=(0, 1, 2)),
    "two": compute.PanelShape(inputs=96, outputs=(192, 192), rank=16, scale=0.7, dropout=0.0, salts=(4, 5)),
    "narrow": compute.PanelShape(inputs=512, outputs=(128,), rank=32, scale=2.0, dropout=0.0, salts=(3,)),
    "four": compute.PanelShape(
        inputs=144, outputs=(48, 16, 32, 304), rank=16, scale=1.0, dropout=0.0, salts=(0, 1, 2, 6)
    ),
}
Run = Callable[..., Sequence[Tensor]]


@pytest.fixture
def adapted() -> Run:
    device = torch.device("cuda")
    if reason := surogate_kernels_triton.unavailable(device):
        pytest.skip(reason)
    kernel = next(k for k in surogate_kernels_triton.kernels() if k.op == "adapted_linears")
    assert kernel.supports(device, torch.bfloat16)
    assert not kernel.supports(device, torch.float32)
    return kernel.function


def make(
    shape: compute.PanelShape, tokens: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """x, panel, adapters, dys; all exact in bf16."""
    x = random(tokens, shape.inputs, seed=0, scale=scale, dtype=torch.bfloat16).cuda()
    panel = shape.allocate(x.device, x.dtype)
    adapters = []
    for number, outputs in enumerate(shape.outputs):
        shape.weight(panel, number).copy_(random(outputs, shape.inputs, seed=10 + number, scale=shape.inputs**-0.5))
        a = random(shape.rank, shape.inputs, seed=20 + number, scale=shape.inputs**-0.5)
        b = random(outputs, shape.rank, seed=30 + number, scale=0.5)
        adapters += [t.bfloat16().float().cuda() for t in (a, b)]
    shape.load(panel, list(zip(adapters[::2], adapters[1::2], strict=True)))
    dys = [random(tokens, o, seed=40 + i, dtype=torch.bfloat16).cuda() for i, o in enumerate(shape.outputs)]
    return x, panel, adapters, dys


def run(function: Run, shape: compute.PanelShape, seed: Tensor | None, *tensors: object) -> list[Tensor]:
    """Outputs, then gradients of x and the adapters."""
    x, panel, adapters, dys = tensors
    leaves = [t.detach().requires_grad_() for t in (x, *adapters)]  # type: ignore[misc]
    outputs = function(leaves[0], panel, seed, shape, *leaves[1:])
    return [t.detach() for t in (*outputs, *torch.autograd.grad(outputs, leaves, dys))]  # type: ignore[arg-type]


def exact(
    shape: compute.PanelShape, seed: Tensor | None, x: Tensor, panel: Tensor, adapters: list[Tensor], dys: list[Tensor]
):
    """The reference in float64."""
    wide = panel.double(), [t.double() for t in adapters], [t.double() for t in dys]
    return run(compute.references["adapted_linears"].function, shape, seed, x.double(), *wide)


def check(found: list[Tensor], expected: list[Tensor], bound: float = BOUND) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
        assert error <= bound, f"tensor {number}: {error:.2e}"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tokens", [1, 64, 600, 1500])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_against_the_reference(adapted: Run, shape: compute.PanelShape, tokens: int, dropout: float) -> None:
    shape = replace(shape, dropout=dropout)
    seed = torch.tensor([-123_456, 777], dtype=torch.int32, device="cuda")
    tensors = make(shape, tokens)
    check(run(adapted, shape, seed, *tensors), exact(shape, seed, *tensors))


def test_no_dropout_without_a_seed(adapted: Run) -> None:
    shape = replace(SHAPES["wide"], dropout=0.5)
    tensors = make(shape, 300)
    check(run(adapted, shape, None, *tensors), exact(shape, None, *tensors))


@pytest.mark.parametrize("scale", [1e4, 1e-6, 0.0], ids=["huge", "tiny", "zero"])
def test_sizes_of_values(adapted: Run, scale: float) -> None:
    tensors = make(SHAPES["wide"], 300, scale)
    check(run(adapted, SHAPES["wide"], None, *tensors), exact(SHAPES["wide"], None, *tensors))


def test_nan_stays_in_its_token(adapted: Run) -> None:
    shape = SHAPES["two"]
    x, panel, adapters, dys = make(shape, 300)
    x[7, 3] = float("nan")
    dys[1][9, 0] = float("nan")
    found = run(adapted, shape, None, x, panel, adapters, dys)
    assert found[0][7].isnan().all()
    assert found[0].isnan().any(1).sum() == 1
    dx, da, _, _, db = found[2:]
    assert dx[9].isnan().all()
    assert dx.isnan().any(1).sum() == 1
    assert da.isnan().any()
    assert db.isnan().any()


def test_layouts_of_x(adapted: Run) -> None:
    shape = SHAPES["narrow"]
    x, *rest = make(shape, 300)
    expected = run(adapted, shape, None, x, *rest)
    strided = torch.cat((x, x), dim=1)[:, : shape.inputs]
    for other in (strided, x.t().contiguous().t()):
        assert all(torch.equal(a, b) for a, b in zip(run(adapted, shape, None, other, *rest), expected, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_equal_inputs_give_equal_bits(adapted: Run, dropout: float) -> None:
    """Alone, and while another stream keeps the GPU busy."""
    shape = replace(SHAPES["wide"], inputs=1024, outputs=(2048, 1024, 1024), dropout=dropout)
    seed = torch.tensor([5, 0], dtype=torch.int32, device="cuda")
    tensors = make(shape, 4096)
    first = run(adapted, shape, seed, *tensors)
    load, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(side):
            load @ load
        again = run(adapted, shape, seed, *tensors)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    torch.cuda.synchronize()


def test_a_captured_graph_takes_new_values(adapted: Run) -> None:
    shape = replace(SHAPES["wide"], dropout=0.1)
    seed = torch.tensor([5, 0], dtype=torch.int32, device="cuda")
    x, panel, adapters, dys = make(shape, 600)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(adapted, shape, seed, x, panel, adapters, dys)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(adapted, shape, seed, x, panel, adapters, dys)
    x.mul_(-0.5)
    seed.fill_(77)
    graph.replay()
    expected = run(adapted, shape, seed, x, panel, adapters, dys)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
