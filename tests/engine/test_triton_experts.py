"""A tiny engine whose experts run on the Triton pack's kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mixture import CONFIG, Mixture
from torch import Tensor

from surogate_core.bundles import KernelPack
from surogate_core.dsl.trace import Compiler, Recompute, Signature, _split, trace_joint
from surogate_core.engine.engine import Engine
from surogate_core.kernels import experts as ops
from surogate_core.kernels.registry import KernelTable, using
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny
from surogate_testing.interpreter import INTERPRETED, run_interpreted, starts_interpreter

DEVICE = "cpu" if INTERPRETED else "cuda"
on_device = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="neither a GPU nor the interpreter"
)
variants = pytest.mark.parametrize("variant", ["triton-fused", "triton-adapters"])
SIZES = {**CONFIG, "hidden_size": 32, "intermediate_size": 48}
OPS = {"route": "triton", "combine": "triton"}
ODD = ("combined_linear", "triton-adapters")


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def linears(variant: str) -> dict[str, str]:
    """Op → kernel of the projections; without one of its own, `combined_linear` calls `grouped_linears`."""
    return {op: variant for op in ("grouped_linears", "combined_linear") if (op, variant) != ODD}


def pack(variant: str) -> KernelPack:
    """The kernels of experts, on any device and in any dtype."""
    import surogate_kernels_triton

    names = {**OPS, **linears(variant)}
    kernels = [k for k in surogate_kernels_triton.kernels() if names.get(k.op) == k.name]
    anywhere = [replace(k, supports=lambda device, dtype: True) for k in kernels]
    return KernelPack(name="triton", kernels=lambda: anywhere)


def engine(variant: str | None, *, recompute: Recompute | bool = False, **changes: Any) -> Engine:
    gpu = (
        {} if INTERPRETED or variant is None else {"dtype": torch.bfloat16, "compiler": "inductor", "cuda_graphs": True}
    )
    return tiny.engine(
        SIZES,
        build=Mixture,
        device="cpu" if variant is None else DEVICE,
        packs=[TORCH_PACK] if variant is None else [TORCH_PACK, pack(variant)],
        lora=tiny.lora(16, dropout=0.1, train_router=True),
        recompute=recompute,
        source=tiny.RandomSource(seed=0, std=0.1, device=torch.device("cpu" if variant is None else DEVICE)),
        **{**gpu, **changes},
    )


@on_device
@variants
@pytest.mark.parametrize("compiler", ["fx", "inductor"] if INTERPRETED else ["inductor"])
def test_gradients_are_those_of_the_references(variant: str, compiler: Compiler) -> None:
    made = engine(variant, compiler=compiler)
    found = tiny.gradients(made, tiny.batches(0))
    chosen = {op: name for (op, _), name in made.programs.kernels.chosen.items()}
    assert chosen.items() >= {"route": "triton", **linears(variant)}.items()
    error, name = tiny.worst({n: g.cpu() for n, g in found.items()}, tiny.gradients(engine(None), tiny.batches(0)))
    assert error <= (1e-5 if INTERPRETED else 4e-2), name


@on_device
@variants
def test_recomputing_changes_no_bit(variant: str) -> None:
    policies = [Recompute(block=False), Recompute(block=True), Recompute(block=False, regions=frozenset({"ffn"}))]
    found = [tiny.gradients(engine(variant, recompute=policy), tiny.batches(0)) for policy in policies]
    for other in found[1:]:
        tiny.ensure_same_bits(found[0], other, "recomputed")


@on_device
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
@pytest.mark.parametrize(
    "recompute",
    [Recompute(block=True), Recompute(block=False, regions=frozenset({"ffn"})), Recompute(block=False, budget=0.3)],
    ids=["block", "ffn", "budget"],
)
def test_a_backward_never_chooses_experts_again(recompute: Recompute, compiler: Compiler) -> None:
    def layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights, _, order, slot, ends = ops.route(x @ router.t(), 2, True)
        (h,) = ops.grouped_linears(x, order, slot, ends, None, [None], None, up)
        (y,) = ops.grouped_linears(torch.relu(h), None, None, ends, None, [None], None, down)
        return ops.combine(y, order, slot, weights)

    shapes, dtype = ((16, 16), (4, 16), (4, 32, 16), (4, 16, 32)), torch.float32 if INTERPRETED else torch.bfloat16
    inputs = [Signature(shape, dtype, torch.device(DEVICE), number < 2) for number, shape in enumerate(shapes)]
    with using(KernelTable.build(torch.device(DEVICE), [pack("triton-fused")])):
        joint = trace_joint(layer, inputs)
    target = torch.ops.surogate_triton.route.default
    assert target in {node.target for node in joint.graph.nodes}
    _, backward, kept = _split(joint, recompute, compiler)
    assert target not in {node.target for node in backward.graph.nodes}
    assert sum(n.meta["val"].dtype == torch.int32 for n in kept) >= 3
