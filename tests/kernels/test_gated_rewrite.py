"""SwiGLU inside the projections around it, where kernels of three packs meet: a rewritten graph against the graph."""

from __future__ import annotations

import pytest
import surogate_kernels_cuda
import surogate_kernels_hopper
import torch
from gpu_packs import triton_packs
from torch import Tensor, fx

from surogate_core.dsl import trace
from surogate_core.dsl.trace import Recompute, Signature
from surogate_core.formats import fp8 as scaled
from surogate_core.kernels import ops, registry
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import KernelTable
from surogate_testing.op_cases import random as wide

pytestmark = pytest.mark.gpu

R, SCALE = 16, 2.0
BOUND = 8e-3
"""‖error‖ / ‖value‖ of FP8 products: results are rounded to bf16, and their sums have fewer bits than fp32."""


@pytest.fixture(autouse=True)
def _needs_the_packs() -> None:
    if reason := surogate_kernels_cuda.unavailable(torch.device("cuda")):
        pytest.skip(reason)
    pytest.importorskip("triton")


@pytest.fixture
def _hopper() -> None:
    if reason := surogate_kernels_hopper.unavailable(torch.device("cuda")):
        pytest.skip(reason)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().cuda()


def shapes(width: int, features: int, dropout: float = 0.0, rank: int = R) -> tuple[PanelShape, PanelShape]:
    up = PanelShape(inputs=width, outputs=(features,) * 2, rank=rank, scale=SCALE, dropout=dropout, salts=(0, 1))
    return up, PanelShape(inputs=features, outputs=(width,), rank=rank, scale=SCALE, dropout=dropout, salts=(2,))


def panel(shape: PanelShape, seed: int) -> tuple[Tensor, list[Tensor]]:
    """A panel and its adapters, which bf16 holds."""
    made = shape.allocate(torch.device("cuda"), torch.bfloat16)
    adapters = []
    for number, outputs in enumerate(shape.outputs):
        shape.weight(made, number).copy_(random(outputs, shape.inputs, seed=seed + number, scale=shape.inputs**-0.5))
        adapters.append(random(shape.rank, shape.inputs, seed=seed + 10 + number, scale=shape.inputs**-0.5).float())
        adapters.append(random(outputs, shape.rank, seed=seed + 20 + number, scale=0.05).float())
    shape.load(made, list(zip(adapters[::2], adapters[1::2], strict=True)))
    return made, adapters


def close(found: Tensor, expected: Tensor, bound: float = 1.5e-2) -> bool:
    """Values were rounded to 8 bits before they were multiplied, and results once more."""
    assert found.shape == expected.shape
    return bool((found.double() - expected).abs().max() <= bound * expected.abs().max() + 1e-30)


def joint_of(shape: tuple[PanelShape, PanelShape], rewritten: bool, arguments: list[Tensor]) -> fx.GraphModule:
    table = KernelTable.build(torch.device("cuda"), triton_packs())
    if not rewritten:
        table.rewrites = ()

    def run(x: Tensor, up: Tensor, down: Tensor, seed: Tensor, *adapters: Tensor) -> Tensor:
        used = seed if shape[0].dropout else None
        gate, value = ops.adapted_linears(x, up, used, shape[0], *adapters[:4])
        return x + ops.adapted_linears(ops.swiglu(gate, value), down, used, shape[1], *adapters[4:])[0]

    inputs = [Signature.of(t, requires_grad=i == 0 or i > 3) for i, t in enumerate(arguments)]
    with registry.using(table):
        return trace.trace_joint(run, inputs)


def targets(joint: fx.GraphModule) -> list[str]:
    return [str(n.target).split(".")[1] for n in joint.graph.nodes if str(n.target).startswith("surogate_")]


def arguments_of(shape: tuple[PanelShape, PanelShape], tokens: int = 200) -> list[Tensor]:
    (up, a), (down, b) = panel(shape[0], 0), panel(shape[1], 5)
    seed = torch.zeros(2, dtype=torch.int32, device="cuda")
    return [random(tokens, shape[0].inputs, seed=9), up, down, seed, *a, *b]


def test_a_rewritten_graph_gives_the_same_and_keeps_less() -> None:
    shape = shapes(128, 512)
    arguments = arguments_of(shape)
    dy = random(200, 128, seed=11)
    plain, rewritten = (joint_of(shape, flag, arguments) for flag in (False, True))
    assert "swiglu_backward" in targets(plain)
    assert targets(rewritten) == ["adapted_linears", "adapted_linears", "down_backward", "gated_backward"]
    values, expected = (fx.Interpreter(joint).run(*arguments, dy) for joint in (rewritten, plain))
    for found, value in zip(values, expected, strict=True):
        assert close(found, value.double())

    def kept(joint: fx.GraphModule) -> int:
        _, _, nodes = trace._split(joint, Recompute(block=False), "inductor")
        return sum(n.meta["val"].numel() for n in nodes)

    assert kept(plain) - kept(rewritten) >= 200 * 512, "silu(gate) · up is kept for nobody"


@pytest.mark.parametrize(
    ("features", "dropout", "rank"), [(512, 0.1, R), (128, 0.0, R), (512, 0.0, 32)], ids=["dropout", "narrow", "rank"]
)
def test_what_the_kernel_is_not_made_for_stays(features: int, dropout: float, rank: int) -> None:
    shape = shapes(128, features, dropout, rank)
    joint = joint_of(shape, True, arguments_of(shape))
    assert "swiglu_backward" in targets(joint)
    assert "gated_backward" not in targets(joint)


# ------------------------------------------------------------------------------------ in FP8


def values(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    x = wide(rows, columns, seed=seed).bfloat16().cuda()
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
            weight = wide(outputs, shape.inputs, seed=len(weights), scale=shape.inputs**-0.5)
            weights.append(scaled.pack(weight.bfloat16().cuda(), 0))
            a = wide(shape.rank, shape.inputs, seed=20 + number, scale=shape.inputs**-0.5)
            own += [t.bfloat16().float().cuda() for t in (a, wide(outputs, shape.rank, seed=30, scale=0.1))]
        shape.load(panel, list(zip(own[::2], own[1::2], strict=True)))
        panels.append(panel)
        adapters += own
    rows = torch.tensor([[90.0, 1.0, 4000.0], [90.0, 1.0, 3000.0], [120.0, 1.0, 9000.0]], device="cuda")
    x = wide(768, 256, seed=9).bfloat16().cuda()
    seed = torch.zeros(2, dtype=torch.int32, device="cuda")
    return [x, seed, *panels, *weights, rows if delayed else torch.zeros_like(rows), *adapters]


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "zero", "infinite", "nan"])
@pytest.mark.parametrize(("tokens", "features"), [(128, 256), (4096, 2560), (1920, 768)])
def test_codes_of_a_gated_backward_are_those_of_its_rows(tokens: int, features: int, kind: str) -> None:
    """Blocks of one step, of many, and of some that begin within a tile; the parts of the sums are the same bits."""
    from surogate_kernels_cuda.gated import ROWS
    from surogate_kernels_hopper.scaled_gated import CODES
    from surogate_native import adapters, gated

    joined = values(tokens, 2 * features, kind, seed=1)
    dh = wide(tokens, features, seed=2).bfloat16().cuda()
    u, b, du = (wide(*s, seed=3).bfloat16().cuda() for s in ((tokens, 32), (2 * features, 32), (tokens, 16)))
    dy = dh.new_zeros(tokens, 2 * features + adapters.ROOM)
    codes = torch.zeros(tokens * 2 * features, dtype=torch.uint8, device="cuda")
    figures = torch.tensor([[300.0, 1 / 300.0, 0.0, 0.0], [2e3, 5e-4, 0.0, 0.0]], device="cuda")
    operands = dh, joined[:, :features], joined[:, features:], u, b, du, gated.SHARED["gated_backward"]
    rows = gated.launch(ROWS, "gated_backward", (dy, dy.stride(0)), *operands)
    found = gated.launch(CODES, "gated_codes", (codes, figures), *operands)
    for a, c in zip(rows, found, strict=True):
        torch.testing.assert_close(a, c, rtol=0, atol=0, equal_nan=True)
    made = scaled.untiled(codes, tokens, 2 * features).view(scaled.E5M2).float()
    for half, own, (scale, _, largest, _) in zip(
        dy[:, : 2 * features].split(features, dim=1), made.split(features, dim=1), figures, strict=True
    ):
        expected = scaled.quantise(half, scale, scaled.E5M2).float()
        torch.testing.assert_close(own, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(largest, scaled.amax_of(half), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("delayed", [False, True])
def test_a_rewritten_graph_of_fp8_gives_the_same(delayed: bool) -> None:
    arguments = feed_forward_arguments(delayed)
    inputs = [Signature.of(t, requires_grad=i == 0 or i > 6) for i, t in enumerate(arguments)]
    values = []
    for rewritten in (True, False):
        table = KernelTable.build(torch.device("cuda"), triton_packs())
        if not rewritten:
            table.rewrites = ()
        with registry.using(table):
            joint = trace.trace_joint(feed_forward, inputs)
        names = {str(n.target) for n in joint.graph.nodes}
        fused = {
            f"surogate_hopper.{n}.default" for n in ("scaled_gated", "scaled_down_backward", "scaled_gated_backward")
        }
        assert names.isdisjoint(fused) != rewritten
        assert ("surogate_triton.swiglu_backward.default" in names) != rewritten
        values.append(fx.Interpreter(joint).run(*arguments, wide(768, 256, seed=3).bfloat16().cuda()))
    assert len(values[0]) == 2 + 1 + 6
    for number, (found, expected) in enumerate(zip(*values, strict=True)):
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        assert error <= 2 * BOUND, f"tensor {number}: {error:.2e}"
