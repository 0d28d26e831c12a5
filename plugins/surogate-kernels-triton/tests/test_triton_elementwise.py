"""SwiGLU and norm + RoPE with a GPU, against their references in float64; and what the engine makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import surogate_kernels_triton
import torch
from torch import Tensor

from surogate_core.plugin import compute
from surogate_core.service.kernels import KernelTable, using
from surogate_core.service.model import Signature, trace_joint
from surogate_testing.op_cases import random

pytestmark = pytest.mark.gpu
BOUNDS = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
dtypes = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
scales = pytest.mark.parametrize("scale", [1.0, 1e3, 1e-3, 0.0], ids=["random", "huge", "tiny", "zero"])
Op = Callable[..., Tensor | Sequence[Tensor]]


def find(name: str) -> Op:
    if reason := surogate_kernels_triton.unavailable(torch.device("cuda")):
        pytest.skip(reason)
    return next(k.function for k in surogate_kernels_triton.kernels() if k.op == name)


def run(op: Op, leaves: Sequence[Tensor], *rest: object, dy_seed: int = 50) -> list[Tensor]:
    """Outputs and gradients."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    found = op(*leaves, *rest)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    dys = [random(*y.shape, seed=dy_seed + i).bfloat16().to(y.device, y.dtype) for i, y in enumerate(outputs)]
    return [t.detach() for t in (*outputs, *torch.autograd.grad(outputs, leaves, dys))]


def check(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        error = float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
        assert error <= bound, f"tensor {number}: {error:.2e}"


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(torch.float16, 1.0), *((torch.bfloat16, scale) for scale in (1.0, 1e12, 1e-12, 0.0))],
    ids=str,
)
@pytest.mark.parametrize("shape", [(5, 48), (1, 1), (130, 1500)], ids=str)
def test_swiglu(dtype: torch.dtype, scale: float, shape: tuple[int, int]) -> None:
    gate, up = (random(*shape, seed=s, scale=scale, dtype=dtype).cuda() for s in (0, 1))
    expected = run(compute.references["swiglu"].function, [gate.double(), up.double()])
    check(run(find("swiglu"), [gate, up]), expected, BOUNDS[dtype])
    both = torch.cat((gate, up), dim=1)
    halves = [both[:, : shape[1]], both[:, shape[1] :]]
    check(run(find("swiglu"), halves), expected, BOUNDS[dtype])


@pytest.mark.parametrize("last", [0, 5, 8, 130])
@pytest.mark.parametrize("features", [1, 48, 1500])
def test_swiglu_of_experts(last: int, features: int) -> None:
    """Up to the last row: the values of all rows, and the bits of their gradients."""
    gate, up = (random(130, features, seed=s, dtype=torch.bfloat16).cuda() for s in (0, 1))
    ends = torch.tensor([last // 2, last], dtype=torch.int32, device="cuda")
    plain, found = (run(partial(find("swiglu"), **named), [gate, up]) for named in ({}, {"ends_E": ends}))
    (y, *gradients), (expected, *others) = ([t[:last] for t in one] for one in (found, plain))
    check([y], [expected.double()], BOUNDS[torch.bfloat16])
    assert all(map(torch.equal, gradients, others))


def test_swiglu_keeps_nan_in_its_place() -> None:
    gate, up = (random(4, 64, seed=s, dtype=torch.bfloat16).cuda() for s in (0, 1))
    gate[2, 3] = float("nan")
    for value in run(find("swiglu"), [gate, up]):
        assert value[2, 3].isnan()
        assert value.isnan().sum() == 1


def make(n: int, heads: int, kv_heads: int, features: int, dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """q, k, v as slices of one buffer, the norms, and in float32 the angles' cos and sin."""
    q = random(n, heads + 2 * kv_heads, features, seed=0, scale=scale, dtype=dtype).cuda()
    norms = [1 + 0.3 * random(features, seed=s) for s in (1, 2)]
    angles = random(n, features // 2, seed=3, scale=3.0).float().cuda()
    sliced = [q[:, :heads], q[:, heads : heads + kv_heads], q[:, heads + kv_heads :]]
    return [*sliced, *(w.to("cuda", dtype) for w in norms), angles.cos(), angles.sin()]


@dtypes
@scales
@pytest.mark.parametrize(("n", "heads", "kv_heads", "features"), [(70, 4, 2, 128), (1, 1, 1, 64), (33, 3, 1, 32)])
def test_norm_rope(dtype: torch.dtype, scale: float, n: int, heads: int, kv_heads: int, features: int) -> None:
    *leaves, cos, sin = make(n, heads, kv_heads, features, dtype, scale)
    expected = run(
        compute.references["norm_rope"].function, [t.double() for t in leaves], 1e-6, cos.double(), sin.double()
    )
    check(run(find("norm_rope"), leaves, 1e-6, cos, sin), expected, BOUNDS[dtype])
    apart = [t.transpose(0, 1).contiguous().transpose(0, 1) if t.ndim == 3 else t for t in leaves]
    check(run(find("norm_rope"), apart, 1e-6, cos, sin), expected, BOUNDS[dtype])


def test_norm_rope_of_other_head_sizes() -> None:
    *leaves, cos, sin = make(9, 2, 1, 80, torch.bfloat16)
    expected = run(compute.references["norm_rope"].function, leaves, 1e-6, cos, sin)
    assert all(torch.equal(a, b) for a, b in zip(run(find("norm_rope"), leaves, 1e-6, cos, sin), expected, strict=True))


def test_norm_rope_keeps_nan_in_its_head() -> None:
    *leaves, cos, sin = make(40, 4, 2, 64, torch.bfloat16)
    leaves[0][7, 1, 3] = float("nan")
    q, k, v, dq, dk, dv, dq_norm, dk_norm = run(find("norm_rope"), leaves, 1e-6, cos, sin)
    for value in (q, dq):
        assert value[7, 1].isnan().all()
        assert value.isnan().sum() == 64
    assert all(t.isfinite().all() for t in (k, v, dk, dv, dk_norm))
    assert dq_norm.isnan().any()


@dtypes
@scales
@pytest.mark.parametrize("shape", [(5, 48), (1, 8), (1300, 130), (70, 4096)], ids=str)
def test_rms_norm(dtype: torch.dtype, scale: float, shape: tuple[int, int]) -> None:
    x = random(*shape, seed=0, scale=scale, dtype=dtype).cuda()
    weight = (1 + 0.3 * random(shape[1], seed=1)).to("cuda", dtype)
    expected = run(compute.references["rms_norm"].function, [x.double(), weight.double()], 1e-6)
    check(run(find("rms_norm"), [x, weight], 1e-6), expected, BOUNDS[dtype])
    apart = x.t().contiguous().t()
    check(run(find("rms_norm"), [apart, weight], 1e-6), expected, BOUNDS[dtype])


def test_rms_norm_keeps_nan_in_its_token() -> None:
    x, weight = random(40, 96, dtype=torch.bfloat16).cuda(), torch.ones(96, device="cuda", dtype=torch.bfloat16)
    x[7, 3] = float("nan")
    y, dx, dweight = run(find("rms_norm"), [x, weight], 1e-6)
    for value in (y, dx):
        assert value[7].isnan().all()
        assert value.isnan().sum() == 96
    assert dweight.isnan().any()


def test_rms_norm_takes_in_the_residual_streams_gradient() -> None:
    """In a block's graph the addition behind the norm's backward is gone, and the sums are what they were."""
    from surogate_core.plugin import ops

    def block(weight_D: Tensor, x_ND: Tensor) -> Tensor:
        return x_ND + torch.tanh(ops.rms_norm(x_ND, weight_D, 1e-6))

    values = [1 + 0.3 * random(96, seed=1).to("cuda", torch.bfloat16), random(33, 96, dtype=torch.bfloat16).cuda()]
    dy = random(33, 96, seed=2, dtype=torch.bfloat16).cuda()
    inputs = [Signature.of(v, requires_grad=True) for v in values]
    table = KernelTable.build(torch.device("cuda"), [surogate_kernels_triton.surogate_kernel_pack()])
    with using(table):
        joint = trace_joint(block, inputs)
    targets = [node.target for node in joint.graph.nodes]
    assert targets.count(torch.ops.surogate_triton.rms_norm_backward.default) == 1
    assert (
        torch.ops.aten.add.Tensor not in targets[targets.index(torch.ops.surogate_triton.rms_norm_backward.default) :]
    )
    wide = [v.double() for v in values]
    expected = run(block, wide, dy_seed=0)[:1]
    leaves = [v.detach().requires_grad_() for v in wide]
    expected += list(torch.autograd.grad(block(*leaves), leaves, dy.double()))
    joint.recompile()
    check(list(joint(*values, dy)), expected, BOUNDS[torch.bfloat16])


def labels_of(n: int, vocabulary: int) -> Tensor:
    labels = torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(1))
    labels[::3] = -100
    labels[-1] = vocabulary - 1
    return labels.cuda()


@dtypes
@pytest.mark.parametrize("scale", [1.0, 30.0, 0.0], ids=["random", "huge", "zero"])
@pytest.mark.parametrize(("n", "vocabulary"), [(1, 1), (5, 61), (33, 4096), (17, 9001)])
def test_cross_entropy(dtype: torch.dtype, scale: float, n: int, vocabulary: int) -> None:
    logits, labels = random(n, vocabulary, scale=scale, dtype=dtype).cuda(), labels_of(n, vocabulary)
    found = run(find("cross_entropy"), [logits], labels)
    expected = run(compute.references["cross_entropy"].function, [logits.double()], labels)
    assert found[0].dtype == torch.float32
    for a, b, bound in zip(found, expected, (1e-5, BOUNDS[dtype]), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound * 1e-1)
    assert not found[1][labels == -100].any()


def test_cross_entropy_of_hostile_logits() -> None:
    logits, labels = random(5, 5000, dtype=torch.bfloat16).cuda(), torch.tensor([4, 4500, -100, 7, 1]).cuda()
    logits[0, 4000] = float("nan")
    logits[1, :4400] = float("-inf")
    logits[2, 9] = float("nan")
    logits[3] = -3e38
    logits[4, 1] = 3e38
    found = run(find("cross_entropy"), [logits], labels)
    expected = run(compute.references["cross_entropy"].function, [logits.double()], labels)
    assert found[0].isnan().tolist() == [True, False, False, False, False]
    keep = [1, 3, 4]
    torch.testing.assert_close(found[0][keep].double(), expected[0][keep], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1][keep].double(), expected[1][keep], rtol=1e-2, atol=1e-6)


def test_equal_inputs_give_equal_bits() -> None:
    *leaves, cos, sin = make(4096, 16, 8, 128, torch.bfloat16)
    first = run(find("norm_rope"), leaves, 1e-6, cos, sin)
    for _ in range(5):
        again = run(find("norm_rope"), leaves, 1e-6, cos, sin)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_no_gradients_are_joined_that_stand_side_by_side() -> None:
    """The backward of a panel reads what those of `swiglu` and `norm_rope` wrote, with no copy in between."""

    shape = compute.PanelShape(inputs=64, outputs=(256, 256), rank=16, scale=1.0, dropout=0.0, salts=(0, 1))
    adapted, swiglu = find("adapted_linears"), find("swiglu")

    def block(x: Tensor, panel: Tensor, *adapters: Tensor) -> Tensor:
        y = swiglu(*adapted(x, panel, None, shape, *adapters))
        assert isinstance(y, Tensor)
        return y

    device = torch.device("cuda")
    sizes = [(32, 64), tuple(shape.allocate(torch.device("meta"), torch.bfloat16).shape)]
    sizes += [(16, 64), (256, 16), (16, 64), (256, 16)]
    signatures = [Signature(s, torch.bfloat16, device, i != 1) for i, s in enumerate(sizes)]
    joint = trace_joint(block, signatures)
    joins = [n for n in joint.graph.nodes if n.target == torch.ops.aten.cat.default]
    assert len(joins) == 1, "x and the room for its low-rank product; not the gradients"
