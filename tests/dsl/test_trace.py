"""Differentiated pieces: equal to autograd under every recompute policy, and keeping only what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from surogate_core.dsl.footprint import footprint
from surogate_core.dsl.slots import Adapter, BoundSlot, LinearSlot, plain_gemm
from surogate_core.dsl.trace import (
    Program,
    Recompute,
    Signature,
    _export,
    _of_experts,
    differentiate,
    trace_joint,
    with_gradients,
    without_gradients,
)
from surogate_core.kernels import ops, registry
from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing.op_cases import random

N, D, H, K, E, F = 12, 16, 4, 2, 8, 20
REGIONS = ("qkv", "att", "ffn", "swiglu", "rmsnorm")
POLICIES = {
    "none": Recompute(block=False),
    "block": Recompute(block=True),
    **{region: Recompute(block=False, regions=frozenset([region])) for region in REGIONS},
    "all regions": Recompute(block=False, regions=frozenset(REGIONS)),
}
BUDGETS = {"half": Recompute(block=False, budget=0.5)}
NAMES = ("norm", "wq", "wk", "wv", "lora_A", "lora_B", "wo", "gate", "up", "down", "x", "cos", "sin", "borders", "seed")
TRAINED = {
    "adapter": frozenset({"lora_A", "lora_B", "x"}),
    "all": frozenset(NAMES) - {"cos", "sin", "borders", "seed"},
}
ATTENTION = torch.ops.surogate.cpu_attention.default
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def slot(name: str, group: str, index: int, adapter: Adapter | None = None) -> LinearSlot:
    return LinearSlot(
        name=name, module=name, inputs=D, outputs=D, bias=False, region=group, adapter=adapter, index=index
    )


def block(*tensors: Tensor) -> Tensor:
    """A decoder layer in small: every region, one adapter with dropout."""
    t = dict(zip(NAMES, tensors, strict=True))

    def project(x: Tensor, name: str, group: str, index: int, **extra: Any) -> Tensor:
        adapter = Adapter(rank=3, scale=0.7, dropout=0.4, dtype=x.dtype) if extra else None
        bound = BoundSlot(
            slot=slot(name, group, index, adapter),
            tensors={"weight": t[name], **extra},
            gemm=plain_gemm,
            seed=None,
            masks=t["seed"],
        )
        return bound(x)

    h = ops.rms_norm(t["x"], t["norm"], 1e-6)
    q = project(h, "wq", "qkv", 0, lora_A=t["lora_A"], lora_B=t["lora_B"]).view(N, H, E)
    k, v = (project(h, name, "qkv", i).view(N, K, E) for i, name in enumerate(("wk", "wv"), start=1))
    q, k = (ops.rope(z, t["cos"], t["sin"]) for z in (q, k))
    a = ops.attention(q, k, v, t["borders"], N, E**-0.5)
    x = t["x"] + project(a.flatten(1), "wo", "att", 3)
    h = ops.rms_norm(x, t["norm"], 1e-6)
    return x + project(ops.swiglu(project(h, "gate", "ffn", 4), project(h, "up", "ffn", 5)), "down", "ffn", 6)


def arguments(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = {
        "norm": (D,),
        "wq": (H * E, D),
        "wk": (K * E, D),
        "wv": (K * E, D),
        "lora_A": (3, D),
        "lora_B": (H * E, 3),
        "wo": (D, H * E),
        "gate": (F, D),
        "up": (F, D),
        "down": (D, F),
        "x": (N, D),
    }
    tensors = [random(*shape, seed=i, scale=0.5, dtype=dtype) for i, shape in enumerate(shapes.values())]
    angles = random(N, E // 2, seed=99, dtype=torch.float32)
    return [
        *tensors,
        angles.cos(),
        angles.sin(),
        torch.tensor([0, 5, 12, 12], dtype=torch.int32),
        torch.tensor([3, 0], dtype=torch.int32),
    ]


def signatures(values: Sequence[Tensor], trained: frozenset[str]) -> list[Signature]:
    return [Signature.of(v, requires_grad=name in trained) for name, v in zip(NAMES, values, strict=True)]


def by_autograd(values: Sequence[Tensor], trained: frozenset[str], dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [v.detach().requires_grad_(name in trained) for name, v in zip(NAMES, values, strict=True)]
    y = block(*leaves)
    return y.detach(), list(torch.autograd.grad(y, [v for v in leaves if v.requires_grad], dy))


@cache
def make(policy: str, trained: str, *, kernels: bool = True, compiler: Any = "fx") -> Program:
    table = KernelTable.build(torch.device("cpu"), [TORCH_PACK] if kernels else [])
    with registry.using(table):
        inputs = signatures(arguments(), TRAINED[trained])
        return differentiate(block, inputs, recompute=(POLICIES | BUDGETS)[policy], compiler=compiler)


def run(program: Program, values: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(output, kept, gradients); between forward and backward every input moves."""
    first = [v.clone() for v in values]
    y, *kept = program.forward(first)
    assert [Signature.of(k) for k in kept] == list(program.kept)
    addresses = {v.untyped_storage().data_ptr() for v in first}
    for tensor in kept:
        assert tensor.untyped_storage().data_ptr() not in addresses, "an input was kept"
    y = y.clone()
    for tensor in first:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    return y, kept, list(program.backward([*values, *kept, dy]))


def graph(call: Any) -> fx.Graph:
    return call.function.__self__.graph  # type: ignore[no-any-return]


def count(call: Any, *targets: Any) -> int:
    return sum(node.target in targets for node in graph(call).nodes)


def check(program: Program, trained: str, tolerance: float = 1e-12) -> None:
    values, dy = arguments(), random(N, D, seed=77)
    expected, wanted = by_autograd(values, TRAINED[trained], dy)
    y, _, found = run(program, values, dy)
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow_cases("qkv", "ffn", "rmsnorm", "swiglu", "att")
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "references"])
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("policy", [*POLICIES, *BUDGETS])
def test_equal_to_autograd(policy: str, trained: str, kernels: bool) -> None:
    check(make(policy, trained, kernels=kernels), trained)


@pytest.mark.slow_cases("block")
@pytest.mark.parametrize(
    "policy", ["block", *(pytest.param(p, marks=pytest.mark.slow) for p in ("none", "half", "all regions"))]
)
def test_inductor_equals_autograd(policy: str) -> None:
    check(make(policy, "adapter", compiler="inductor"), "adapter")


@pytest.mark.slow_cases("qkv", "ffn", "rmsnorm")
@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_inputs_cost_no_products(policy: str) -> None:
    """Trained: each of 7 weights needs a gradient product. Frozen: those 7 are gone, and nothing else."""
    frozen, trained = make(policy, "adapter"), make(policy, "all")
    assert count(frozen.forward, *MATMULS) == count(trained.forward, *MATMULS) == 9
    assert count(trained.backward, *MATMULS) - count(frozen.backward, *MATMULS) == 7
    if policy == "none":
        # 7 for d_x of each projection; of the adapter, two weights and two activations.
        assert count(frozen.backward, *MATMULS) == 11


@pytest.mark.parametrize("policy", POLICIES)
def test_attention_runs_again_only_when_asked(policy: str) -> None:
    program = make(policy, "adapter")
    assert count(program.forward, ATTENTION) == 1
    assert count(program.backward, ATTENTION) == (policy in ("block", "att", "all regions"))


def test_regions_are_computed_again_only_when_asked() -> None:
    """How many products and norms each switch adds to the backward."""
    plain = make("none", "all")
    norms = torch.ops.surogate.cpu_rms_norm.default
    swiglu = torch.ops.surogate.cpu_swiglu.default
    assert count(plain.backward, norms, swiglu) == 0
    # Of q, k and v only v is read by the backward (RoPE has turned the others), and the adapter's u.
    for policy, matmuls, of_norms, of_swiglu in (
        ("qkv", 2, 0, 0),
        ("ffn", 2, 0, 0),
        ("swiglu", 0, 0, 1),
        ("rmsnorm", 0, 2, 0),
    ):
        program = make(policy, "all")
        assert count(program.backward, norms) == of_norms, policy
        assert count(program.backward, swiglu) == of_swiglu, policy
        assert count(program.backward, *MATMULS) - count(plain.backward, *MATMULS) == matmuls, policy


def nbytes(program: Program) -> int:
    return sum(s.nbytes for s in program.kept)


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "references"])
def test_recomputing_keeps_less(trained: str, kernels: bool) -> None:
    kept = {policy: nbytes(make(policy, trained, kernels=kernels)) for policy in POLICIES}
    assert kept["block"] == 0
    assert all(kept[region] <= kept["none"] for region in REGIONS), kept
    # Of a frozen projection the input is not kept in the first place.
    saving = REGIONS if trained == "all" else ("qkv", "att", "ffn")
    assert all(kept[region] < kept["none"] for region in saving), kept
    assert 0 < kept["all regions"] < min(kept[region] for region in REGIONS)


def test_the_reference_of_attention_is_recomputed_too() -> None:
    """Its N² weights are the largest thing that it keeps."""
    scores = Signature((H, N, N), torch.float64, torch.device("cpu"))
    assert scores in make("none", "adapter", kernels=False).kept
    assert scores not in make("att", "adapter", kernels=False).kept


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
@pytest.mark.parametrize("policy", ["none", "block", "qkv"])
def test_residuals_are_foretold_without_compiling(policy: str, compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = make(policy, "adapter") if compiler == "fx" else None

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("must not compile")

    monkeypatch.setattr(torch._inductor, "compile", refuse)
    table = KernelTable.build(torch.device("cpu"), [TORCH_PACK])
    with registry.using(table):
        inputs = signatures(arguments(), TRAINED["adapter"])
        told = footprint(block, inputs, recompute=POLICIES[policy], compiler=compiler).kept
    if program is not None:
        assert told == program.kept
    assert bool(told) == (policy != "block")


def test_reads_input_says_what_the_backward_takes() -> None:
    program = make("none", "adapter")
    reads = dict(zip(NAMES, program.reads_input, strict=True))
    assert reads["wq"]  # for d_h
    assert reads["norm"]
    assert not reads["seed"]  # the mask was kept
    again = dict(zip(NAMES, make("block", "adapter").reads_input, strict=True))
    assert again["seed"]
    assert all(again[name] for name, read in reads.items() if read)
    values, dy = arguments(), random(N, D, seed=77)
    _, kept, expected = run(program, values, dy)
    unread = [v if reads[name] else torch.full_like(v, 9) for name, v in zip(NAMES, values, strict=True)]
    for a, b in zip(program.backward([*unread, *kept, dy]), expected, strict=True):
        assert torch.equal(a, b)


def test_joint_and_forward_alone() -> None:
    values, dy = arguments(), random(N, D, seed=77)
    expected, wanted = by_autograd(values, TRAINED["all"], dy)
    inputs = signatures(values, TRAINED["all"])
    y, *found = with_gradients(block, inputs, compiler="fx")([*values, dy])
    torch.testing.assert_close(y, expected)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    (alone,) = without_gradients(block, inputs, compiler="fx")(values)
    torch.testing.assert_close(alone, expected)


def test_the_joint_graph_has_no_gradients_of_what_needs_none() -> None:
    joint = trace_joint(block, signatures(arguments(), TRAINED["adapter"]))
    (output,) = (n for n in joint.graph.nodes if n.op == "output")
    shapes = [tuple(n.meta["val"].shape) for n in output.args[0]]
    assert shapes == [(N, D), (3, D), (H * E, 3), (N, D)]


def simple(function: Callable[..., Tensor], *values: Tensor, recompute: Recompute) -> list[Tensor]:
    inputs = [Signature.of(v, requires_grad=True) for v in values]
    program = differentiate(function, inputs, recompute=recompute, compiler="fx")
    y, *kept = program.forward(list(values))
    return [y, *program.backward([*values, *kept, torch.ones_like(y)])]


@pytest.mark.parametrize("block", [True, False])
def test_an_output_that_the_backward_needs(block: bool) -> None:
    x = random(3, 4)
    y, dx = simple(torch.exp, x, recompute=Recompute(block=block))
    torch.testing.assert_close(y, x.exp())
    torch.testing.assert_close(dx, x.exp())


@pytest.mark.slow_cases("inductor")
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
@pytest.mark.parametrize("recompute", [Recompute(block=True), Recompute(block=False), *BUDGETS.values()], ids=str)
def test_several_outputs_of_which_some_have_gradients(recompute: Recompute, compiler: Any) -> None:
    def function(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        h = torch.sigmoid(x @ w)
        return h @ w.t(), (h > 0.5).sum(0).float(), h.square().sum(0), h.detach().sum(0)

    x, w = random(6, 4).double(), random(4, 5, seed=1).double()
    program = differentiate(
        function, [Signature.of(v, requires_grad=True) for v in (x, w)], recompute=recompute, compiler=compiler
    )
    y, count, squares, total, *kept = program.forward([x, w])
    dy, dsquares = random(6, 4, seed=2).double(), random(5, seed=3).double()
    found = program.backward([x, w, *kept, dy, dsquares])
    x.requires_grad_()
    w.requires_grad_()
    expected = function(x, w)
    for a, b in zip((y, count, squares, total), expected, strict=True):
        torch.testing.assert_close(a, b.detach())
    wanted = torch.autograd.grad([expected[0], expected[2]], [x, w], [dy, dsquares])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("block", [True, False])
def test_several_results_of_one_op(block: bool) -> None:
    """Tuples are never kept, their elements are."""
    x, w = random(3, 4), random(4, seed=1)

    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = (x * w).exp().split(2, dim=1)
        values, _ = torch.max(x, dim=1, keepdim=True)
        return a * b * values

    found = simple(function, x, w, recompute=Recompute(block=block))
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    y = function(*leaves)
    expected = [y.detach(), *torch.autograd.grad(y.sum(), leaves)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@torch.library.custom_op("surogate_test::side_by_side", mutates_args=())
def side_by_side(x: Tensor) -> Tensor:
    """[2x | 3x | room], of width 2·F + 4."""
    return torch.cat((2 * x, 3 * x, torch.full((x.shape[0], 4), float("nan"))), dim=1)


@side_by_side.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], 2 * x.shape[1] + 4)


@pytest.mark.parametrize(
    ("first", "second", "room", "left"),
    [
        (slice(0, 8), slice(8, 16), 4, 0),
        (slice(8, 16), slice(0, 8), 4, 1),
        (slice(0, 8), slice(7, 15), 4, 1),
        (slice(0, 8), slice(8, 16), 5, 1),
        (slice(0, 8), slice(8, 16), 0, 1),
    ],
    ids=["all of the buffer", "in another order", "overlapping", "more room", "no room"],
)
def test_what_stands_side_by_side_is_not_joined(first: slice, second: slice, room: int, left: int) -> None:
    def joined(x: Tensor) -> Tensor:
        both = side_by_side(x)
        parts = [both[:, s].reshape(5, -1, 2) for s in (first, second)]
        parts += [x.new_empty(5, room // 2, 2)] if room % 2 == 0 and room else []
        whole = torch.cat(parts, dim=1).view(5, -1)
        if room % 2:
            whole = torch.cat((both[:, first], both[:, second], x.new_empty(5, room)), dim=1)
        return whole[:, :16]

    x = torch.randn(5, 8)
    call = without_gradients(joined, [Signature.of(x)], compiler="fx")
    (found,) = call([x])
    both = torch.cat((2 * x, 3 * x), dim=1)
    assert torch.equal(found, torch.cat((both[:, first], both[:, second]), dim=1))
    module = _export(joined, [Signature.of(x)], joint=False)
    assert sum(n.target == torch.ops.aten.cat.default for n in module.graph.nodes) == left


@pytest.mark.parametrize(
    ("reader", "joins"),
    [
        (lambda x, both: both[:, :16].sum(1, keepdim=True), 0),
        (lambda x, both: both.view(5, 10, 2)[:, 2:6].flatten(1), 0),
        (lambda x, both: both[:, :20], 1),
        (lambda x, both: both[:, 16:], 1),
        (lambda x, both: both.split([10, 7, 3], dim=1)[1], 1),
        (lambda x, both: both.t()[15:18], 1),
        (lambda x, both: both * 2, 1),
    ],
    ids=["columns in front", "as heads", "all columns", "columns behind", "a part", "transposed", "the buffer"],
)
def test_columns_that_another_reads_are_no_room(reader: Callable[[Tensor, Tensor], Tensor], joins: int) -> None:
    """What is joined ends in columns that its reader writes into: they may not be columns that something else reads."""

    def joined(x: Tensor) -> Tensor:
        both = side_by_side(x)
        wide = torch.cat((both[:, :16], x.new_empty(5, 4)), dim=1)
        return wide[:, :16].exp().sum() + reader(x, both).exp().sum()

    module = _export(joined, [Signature.of(torch.randn(5, 8))], joint=False)
    assert sum(n.target == torch.ops.aten.cat.default for n in module.graph.nodes) == joins


def test_columns_of_an_input_are_no_room() -> None:
    """An input is read elsewhere: the block's by its backward, a weight by other layers."""

    def joined(x: Tensor) -> Tensor:
        return torch.cat((x[:, :4], x.new_empty(5, 4)), dim=1)[:, :4].exp()

    module = _export(joined, [Signature.of(torch.randn(5, 8))], joint=False)
    assert sum(n.target == torch.ops.aten.cat.default for n in module.graph.nodes) == 1


@pytest.mark.parametrize(("width", "kept"), [(64, [(3, 1), (3, 1)]), (8, [])])
def test_an_op_is_not_repeated_for_a_small_part_of_its_results(width: int, kept: list[tuple[int, ...]]) -> None:
    """The backward of a layer norm wants its mean and deviation alone: kept where they are little beside the output."""
    values = [random(3, width), random(width, seed=1), random(width, seed=2)]

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, [width], w, b)

    inputs = [Signature.of(v, requires_grad=True) for v in values]
    program = differentiate(function, inputs, recompute=Recompute(block=True), compiler="fx")
    assert [s.shape for s in program.kept] == kept
    ops_again = [n.name for n in program.backward.function.__self__.graph.nodes if n.name == "native_layer_norm"]  # type: ignore[attr-defined]
    assert len(ops_again) == (0 if kept else 1)
    found = simple(function, *values, recompute=Recompute(block=True))
    leaves = [v.clone().requires_grad_() for v in values]
    y = function(*leaves)
    for a, b in zip(found, [y.detach(), *torch.autograd.grad(y.sum(), leaves)], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("experts", [False, True])
def test_only_what_is_named_so_counts_as_a_tensor_of_experts(experts: bool) -> None:
    """A packed dense weight has as many axes as packed experts."""
    cpu = torch.device("cpu")
    inputs = [
        Signature((4, 8), torch.uint8, cpu, of_experts=experts),
        Signature((3, 8), torch.float32, cpu, requires_grad=True),
    ]
    joint = trace_joint(lambda packed, x: x * packed.float().sum(0), inputs)
    found = {node.op for node in _of_experts(joint)}
    assert found == ({"placeholder", "call_function"} if experts else set())


def test_two_threads_may_trace() -> None:
    """A generation ahead is compiled while the run compiles what its samples need."""
    given = [
        Signature((N, D), torch.float32, torch.device("cpu")),
        Signature((D, D), torch.float32, torch.device("cpu")),
    ]

    def made(number: int) -> Tensor:
        def repeated(x: Tensor, weight: Tensor) -> Tensor:
            for _ in range(20):
                with ops.region("ffn"):
                    x = ops.rms_norm(x @ weight, weight[0], 1e-6)
            return x

        call = without_gradients(repeated, given, compiler="fx")
        (found,) = call([torch.ones(N, D), torch.eye(D)])
        return found

    with ThreadPoolExecutor(2) as threads:
        first, *others = threads.map(made, range(8))
    assert all(torch.equal(first, other) for other in others)
