"""Side outputs of blocks: their values, the gradient of a term of the loss, and what is said of them.

Shape suffixes: N tokens, D features, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import router_family
import torch
from router_family import CONFIG, RoutedModel
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.dsl.declare import Multiply
from surogate_core.dsl.slots import plain_gemm
from surogate_core.engine.engine import Engine
from surogate_core.kernels import ops
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads

COEFFICIENT = float(CONFIG["router_aux_loss_coef"])


def engine(**changes: Any) -> Engine:
    """The toy family in an engine."""
    return tiny.engine(CONFIG, build=RoutedModel, **changes)


def by_plain_pytorch(
    made: Engine, batches: Sequence[MicroBatch]
) -> tuple[dict[str, Tensor], dict[str, list[list[Tensor]]]]:
    """(gradients of cross-entropy and balance by HF name, side output → values of each micro-step and layer)."""
    masters = {name: m.detach().clone().requires_grad_() for name, m in made.parameters.masters().items()}
    label_tokens = sum(batch.label_tokens for batch in batches)
    seen: dict[str, list[list[Tensor]]] = {spec.name: [] for spec in made.plan.layers[0].sides}
    total = torch.zeros(())
    for batch in batches:
        tables = {**made.model.tables(batch.positions, torch.float32), "cu_seqlens": batch.cu_seqlens}
        x_ND = torch.nn.functional.embedding(batch.input_ids, masters[made.plan.embed.specs[0].hf_name])
        for values in seen.values():
            values.append([])
        for piece in made.plan.layers:
            assert piece.block is not None
            tensors = {spec.name: masters[spec.hf_name] for spec in piece.specs}
            x_ND, sides = piece.block.bind(tensors, piece.slots, Multiply(plain_gemm)).outputs(x_ND, tables)
            total = total + COEFFICIENT * sides["router.balance"] / len(batches)
            for name, value in sides.items():
                seen[name][-1].append(value.detach())
        head = {spec.name: masters[spec.hf_name] for spec in made.plan.head.specs}
        total = total + ops.cross_entropy(made.model.logits(x_ND, head), batch.labels).sum() / label_tokens
    found = torch.autograd.grad(total, list(masters.values()))
    return dict(zip(masters, found, strict=True)), seen


@pytest.mark.parametrize("recompute", [False, True])
def test_a_term_of_the_loss_has_its_gradient_and_all_values_leave_the_programs(recompute: bool) -> None:
    batches = tiny.batches(0, 3)
    made = engine(recompute=recompute)
    expected, seen = by_plain_pytorch(made, batches)
    error, name = tiny.worst(tiny.gradients(made, batches), expected)
    assert error <= 1e-5, name
    without = tiny.gradients(tiny.engine({**CONFIG, "router_aux_loss_coef": 0.0}, build=RoutedModel), batches)
    assert tiny.worst(without, expected)[0] > 1e-2, "the term must matter"

    sides = made.train_step(batches, step=0, lr=0.0).sides()
    assert {name: role for name, (role, _) in sides.items()} == {
        "router.tokens": "expert_tokens",
        "router.balance": "loss",
        "router.entropy": "figure",
    }
    for name, (_, total_L) in sides.items():
        expected_L = torch.stack([torch.stack(layers) for layers in seen[name]]).sum(0)
        torch.testing.assert_close(total_L, expected_L, rtol=1e-5, atol=1e-6)
    tokens_LE = sides["router.tokens"][1]
    assert tokens_LE.sum(1).tolist() == [3 * tiny.TOKENS] * 2


def test_sums_begin_anew_in_each_step() -> None:
    made = engine()
    first, again = (made.train_step(tiny.batches(0), step=step, lr=0.0).sides() for step in range(2))
    assert all(torch.equal(total, again[name][1]) for name, (_, total) in first.items())
    made.evaluate(tiny.batches(1))
    third = made.train_step(tiny.batches(0), step=2, lr=0.0).sides()
    assert all(torch.equal(total, third[name][1]) for name, (_, total) in first.items()), "an evaluation adds nothing"


def test_a_rank_without_a_micro_batch_adds_to_no_side_output() -> None:
    """The step has one micro-batch, and at level 2 both ranks take a micro-step: the other one's is emptied."""

    def work(fabric: VirtualFabric) -> list[dict[str, Tensor]]:
        sharing: dict[str, Any] = {"ranks": fabric.world, "zero_level": 2, "varying": True, "micro_batches": 8}
        assembly = tiny.assembly(CONFIG, build=RoutedModel, **sharing)
        made = Engine(assembly, tiny.random_source(), mesh=fabric.mesh() if fabric.world > 1 else None)
        found = [made.train_step(tiny.batches(0, n), step=step, lr=0.0).sides() for step, n in enumerate((1, 3))]
        return [{name: total for name, (_, total) in sides.items()} for sides in found]

    (one,) = in_threads(1, work)
    for found in in_threads(2, work):
        for ours, expected in zip(found, one, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_adapters_train_beside_a_router() -> None:
    made = engine(lora=tiny.lora())
    losses = tiny.train(made, 4, lr=0.1, same=True)
    assert losses[-1] < losses[0]


def test_a_name_that_is_not_declared_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Misnamed: forward returns .* \['tokens'\].*\['router.tokens'\]"):
        tiny.engine(CONFIG, build=router_family.MisnamedModel)


def test_a_model_without_side_outputs_reports_none() -> None:
    made = tiny.engine()
    assert made.train_step(tiny.batches(0), step=0, lr=0.0).sides() == {}


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_side_outputs_leave_cuda_graphs(recompute: bool) -> None:
    settings: dict[str, Any] = {"dtype": torch.float32, "recompute": recompute}
    sides = [engine(**settings), engine(device="cuda", cuda_graphs=True, compiler="inductor", **settings)]
    batches = tiny.batches(0, 3)
    for step in range(3):
        cpu, cuda = (e.train_step(batches, step=step, lr=1e-2) for e in sides)
        assert cuda.read() == pytest.approx(cpu.read(), rel=1e-3)
        for name, (_, total) in cpu.sides().items():
            torch.testing.assert_close(cuda.sides()[name][1], total, rtol=1e-3, atol=1e-3)
