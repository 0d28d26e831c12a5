"""Per-token columns, and losses of whole sequences.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, WEIGHTS, MicroBatch
from surogate_core.bundles import Objective
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.kernels import ops
from surogate_testing import tiny

BETA = 0.7
DOCUMENTS = tiny.documents((9, 7, 8, 6))


def token_loss(logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Each token's surprise."""
    return ops.cross_entropy(logits_NV, labels_N)


def preferred(loss_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """DPO: documents 0 and 2 are chosen over 1 and 3, by their log-probabilities beside those of a reference model."""
    document_N = (positions_N == 0).cumsum(0) - 1
    ratio_N = torch.where(loss_N > 0, columns["reference"] - loss_N, 0.0)
    ratio_P = ratio_N.new_zeros(8).index_add(0, document_N, ratio_N)
    return -torch.nn.functional.logsigmoid(BETA * (ratio_P[:4:2] - ratio_P[1:4:2])).sum()


DPO = Objective(name="dpo", token_loss=token_loss, columns=("reference",), sequence_loss=preferred)


def batch(**columns: Tensor) -> MicroBatch:
    """Two pairs of documents."""
    return replace(tiny.batch(DOCUMENTS), columns=columns)


def reference() -> Tensor:
    """[N] losses of the reference model."""
    return torch.rand(tiny.TOKENS, generator=torch.Generator().manual_seed(1)) * 4


def test_an_objective_reads_the_columns_of_its_own_tokens() -> None:
    def advantage_loss(logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return ops.cross_entropy(logits_NV, labels_N) * columns["advantages"]

    advantages = torch.randn(tiny.TOKENS, generator=torch.Generator().manual_seed(2))
    objective = Objective(name="policy", token_loss=advantage_loss, columns=("advantages",))
    weighted = tiny.engine(columns=(WEIGHTS,))
    expected = tiny.gradients(weighted, [replace(batch(weights=advantages), divisor=5.0)])
    for chunks in (1, 3):
        made = tiny.engine(objective=objective, columns=("advantages",), head_chunks=chunks)
        found = tiny.gradients(made, [replace(batch(advantages=advantages), divisor=5.0)])
        error, name = tiny.worst(found, expected)
        assert error <= 1e-5, name


def test_weights_may_be_negative_and_the_divisor_is_a_number_of_its_own() -> None:
    made = tiny.engine(columns=(WEIGHTS,))
    weights = torch.where(tiny.batch(DOCUMENTS).labels != IGNORE_LABEL, 1.0, 0.0)
    up = tiny.gradients(made, [replace(batch(weights=weights), divisor=8.0)])
    down = tiny.gradients(made, [replace(batch(weights=-weights), divisor=8.0)])
    error, name = tiny.worst(down, {n: -g for n, g in up.items()})
    assert error == 0, name
    halved = tiny.gradients(made, [replace(batch(weights=weights), divisor=16.0)])
    error, name = tiny.worst(halved, {n: g / 2 for n, g in up.items()})
    assert error <= 1e-6, name
    summed = made.evaluate([replace(batch(weights=weights), divisor=8.0)])[0] * 8.0
    assert made.evaluate([batch(weights=weights)])[0] * weights.sum().item() == pytest.approx(summed, rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_loss_of_sequences_has_the_gradient_of_its_two_passes(chunks: int) -> None:
    """Against weights that are the loss's own derivatives by each token's loss, computed by plain PyTorch."""
    made = batch(reference=reference())
    logits_NV = tiny.engine().logits(batch())
    loss_N = ops.cross_entropy(logits_NV, made.labels).requires_grad_()
    loss = preferred(loss_N, made.positions, made.columns)
    (coefficients_N,) = torch.autograd.grad(loss, [loss_N])
    assert (coefficients_N < 0).any(), "an answer that loses gets less likely"
    assert (coefficients_N > 0).any()
    expected = tiny.gradients(
        tiny.engine(columns=(WEIGHTS,)), [replace(batch(weights=coefficients_N.detach()), divisor=2.0)]
    )
    engine = tiny.engine(objective=DPO, columns=DPO.columns, head_chunks=chunks)
    error, name = tiny.worst(tiny.gradients(engine, [replace(made, divisor=2.0)]), expected)
    assert error <= 1e-5, name
    pairs = [replace(made, divisor=2.0)]
    assert engine.evaluate(pairs)[0] == pytest.approx(loss.item() / 2, rel=1e-6)
    assert engine.train_step(pairs, step=0, lr=0.0).read()[0] == pytest.approx(loss.item() / 2, rel=1e-6)


def test_a_sum_over_tokens_is_the_same_in_one_pass_and_in_two() -> None:
    twice = Objective(
        name="sum", token_loss=token_loss, sequence_loss=lambda loss_N, positions_N, columns: loss_N.sum()
    )
    sides = [tiny.gradients(tiny.engine(**more), [batch()]) for more in ({}, {"objective": twice})]
    error, name = tiny.worst(*sides)
    assert error <= 1e-6, name


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_frozen_head_runs_once_with_the_same_gradients(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, lora = [replace(batch(reference=reference()), divisor=2.0)], {"lora": tiny.lora()}
    settings = {"objective": DPO, "columns": DPO.columns, "head_chunks": chunks, **lora}
    once = tiny.engine(**settings)
    assert once.programs.scales_head
    with monkeypatch.context() as patched:
        patched.setattr(ProgramBuilder, "scales_head", False)
        twice = tiny.engine(**settings)
        expected, losses = tiny.gradients(twice, made), [twice.accumulate(made)]
    error, name = tiny.worst(tiny.gradients(once, made), expected)
    assert error <= 1e-6, name
    assert any(gradient.any() for gradient in expected.values())
    assert [once.accumulate(made)] == losses


@pytest.mark.gpu
def test_both_passes_are_captured_in_a_graph() -> None:
    made = [replace(batch(reference=reference()), divisor=2.0)]
    settings = {"objective": DPO, "columns": DPO.columns, "lora": tiny.lora(), "dtype": torch.float32}
    losses = [
        [e.train_step(made, step=step, lr=1e-2).read()[0] for step in range(4)]
        for e in (tiny.engine(**settings), tiny.engine(device="cuda", cuda_graphs=True, **settings))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
