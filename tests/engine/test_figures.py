"""Figures of objectives: beside the loss in steps and evaluations, without a change of the loss or a gradient.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, WEIGHTS, MicroBatch
from surogate_core.bundles import Objective
from surogate_core.engine.engine import Engine
from surogate_core.kernels import ops
from surogate_core.kernels.documents import document_starts, document_sums
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads

Columns = Mapping[str, Tensor]


def token_loss(logits_NV: Tensor, labels_N: Tensor, columns: Columns) -> Tensor:
    return ops.cross_entropy(logits_NV, labels_N)


def token_figures(logits_NV: Tensor, labels_N: Tensor, columns: Columns) -> list[Tensor]:
    """The entropy, its maximum, and whether the label is the most probable token."""
    log_NV = logits_NV.float().log_softmax(-1)
    entropy_N = -(log_NV.exp() * log_NV).sum(-1)
    return [entropy_N, entropy_N, (logits_NV.argmax(-1) == labels_N).float()]


def sequence_figures(loss_N: Tensor, positions_N: Tensor, columns: Columns) -> list[Tensor]:
    """Documents, their losses, and the square of these."""
    starts_N = document_starts(positions_N).float()
    sums_N = document_sums(loss_N, positions_N)
    return [starts_N.sum(), (starts_N * sums_N).sum(), (starts_N * sums_N.square()).sum()]


def sequence_loss(loss_N: Tensor, positions_N: Tensor, columns: Columns) -> Tensor:
    return (document_sums(loss_N, positions_N).square() * document_starts(positions_N)).sum()


TOKENS: dict[str, Any] = {
    "figures": ("entropy", "entropy_max", "accuracy"),
    "token_figures": token_figures,
    "largest": ("entropy_max",),
}
SEQUENCES: dict[str, Any] = {"figures": ("documents", "loss", "square"), "sequence_figures": sequence_figures}
BOTH: dict[str, Any] = {
    **TOKENS,
    **SEQUENCES,
    "count": "documents",
    "figures": (*TOKENS["figures"], *SEQUENCES["figures"]),
}


def objective(more: Mapping[str, Any], *, by_sequence: bool = False) -> Objective:
    loss = sequence_loss if by_sequence else None
    return Objective(name="figured", token_loss=token_loss, sequence_loss=loss, **more)


def expected(engine: Engine, batches: Sequence[MicroBatch]) -> dict[str, float]:
    """By plain PyTorch in float64."""
    tokens, documents = [], []
    for batch in batches:
        logits_NV = engine.logits(batch).double()
        trained_N = batch.labels != IGNORE_LABEL
        tokens.append(torch.stack([v[trained_N].double() for v in token_figures(logits_NV, batch.labels, {})]))
        loss_N = torch.nn.functional.cross_entropy(logits_NV, batch.labels, reduction="none")
        documents += [part.sum() for part in loss_N.tensor_split(torch.where(batch.positions == 0)[0][1:])]
    found, sums = torch.cat(tokens, 1), torch.stack(documents)
    return {
        "entropy": found[0].mean().item(),
        "entropy_max": found[1].max().item(),
        "accuracy": found[2].mean().item(),
        "documents": float(len(sums)),
        "loss": sums.mean().item(),
        "square": sums.square().mean().item(),
    }


@pytest.mark.slow_cases("of sequences", "1")
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("by_sequence", [False, True, tiny.lora()], ids=["by token", "by sequence", "frozen head"])
@pytest.mark.parametrize("more", [TOKENS, SEQUENCES, BOTH], ids=["of tokens", "of sequences", "of both"])
def test_steps_and_evaluations_report_them(more: Mapping[str, Any], by_sequence: Any, chunks: int) -> None:
    batches = tiny.batches(0, 3)
    lora = None if isinstance(by_sequence, bool) else by_sequence
    made = tiny.engine(objective=objective(more, by_sequence=bool(by_sequence)), head_chunks=chunks, lora=lora)
    wanted = {name: value for name, value in expected(made, batches).items() if name in more["figures"]}
    made.evaluate(batches)
    assert dict(made.evaluated) == pytest.approx(wanted, rel=1e-5)
    for step in range(2):
        assert made.train_step(batches, step=step, lr=0.0).figures() == pytest.approx(wanted, rel=1e-5)
    assert made.train_step(batches[:1], step=2, lr=0.0).figures() != pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("by_sequence", [False, True], ids=["by token", "by sequence"])
def test_they_change_neither_loss_nor_gradients(by_sequence: bool) -> None:
    batches = [replace(batch, columns={WEIGHTS: torch.rand(tiny.TOKENS)}) for batch in tiny.batches(0, 2)]
    sides = []
    for more in ({}, BOTH):
        made = tiny.engine(objective=objective(more, by_sequence=by_sequence), columns=(WEIGHTS,), head_chunks=2)
        loss = made.train_step(batches, step=0, lr=0.0).read()
        sides.append((loss, made.evaluate(batches), tiny.gradients(made, batches)))
    assert sides[0][:2] == sides[1][:2]
    for name, gradient in sides[0][2].items():
        assert torch.equal(gradient, sides[1][2][name]), name


def test_an_objective_without_figures_reports_none() -> None:
    made = tiny.engine()
    made.evaluate(tiny.batches(0))
    assert made.evaluated == {}
    assert made.train_step(tiny.batches(0), step=0, lr=0.0).figures() == {}


def test_a_step_without_labels_has_no_figures() -> None:
    batch = tiny.batches(0)[0]
    batch = replace(batch, labels=torch.full_like(batch.labels, IGNORE_LABEL), label_tokens=0)
    made = tiny.engine(objective=objective(BOTH))
    assert made.train_step([batch], step=0, lr=0.0).figures() == {}
    assert made.train_step(tiny.batches(0), step=1, lr=0.0).figures()["entropy_max"] > 0


def test_ranks_report_the_figures_of_one() -> None:
    held = [tiny.batch(tiny.documents(seed=i)) for i in range(5)]

    def work(fabric: VirtualFabric) -> list[Mapping[str, float]]:
        chosen = objective(BOTH)
        assembly = tiny.assembly(ranks=fabric.world, micro_batches=4, zero_level=0, exact=True, objective=chosen)
        made = Engine(assembly, tiny.random_source(), mesh=fabric.mesh() if fabric.world > 1 else None)
        with made.mesh.turn:
            made._compile_evaluation()
        made.evaluate(held)
        return [made.evaluated, made.train_step(tiny.batches(0, 4), step=0, lr=1e-2).figures()]

    (one,) = in_threads(1, work)
    assert len(one[0]) == len(one[1]) == len(BOTH["figures"])
    for found in in_threads(2, work):
        assert found == one


def test_a_rank_without_a_micro_batch_adds_to_no_figure() -> None:
    """The step has one micro-batch, and at level 2 both ranks take a micro-step: the other one's is emptied."""

    def work(fabric: VirtualFabric) -> list[Mapping[str, float]]:
        sharing: dict[str, Any] = {"ranks": fabric.world, "zero_level": 2, "varying": True, "micro_batches": 8}
        assembly = tiny.assembly(objective=objective(BOTH), **sharing)
        made = Engine(assembly, tiny.random_source(), mesh=fabric.mesh() if fabric.world > 1 else None)
        return [made.train_step(tiny.batches(0, n), step=step, lr=0.0).figures() for step, n in enumerate((1, 3))]

    (one,) = in_threads(1, work)
    for found in in_threads(2, work):
        for ours, expected in zip(found, one, strict=True):
            assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"figures": ("a",)}, "`figures` names what"),
        ({"token_figures": token_figures}, "`figures` names what"),
        ({**BOTH, "count": None}, "`count` must name"),
        ({**SEQUENCES, "largest": ("loss",)}, "`largest` names figures"),
    ],
)
def test_names_must_fit_the_functions(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        objective(fields)


@pytest.mark.gpu
@pytest.mark.parametrize("by_sequence", [False, True], ids=["by token", "by sequence"])
def test_they_are_captured_in_the_graphs_of_steps(by_sequence: bool) -> None:
    batches = tiny.batches(0, 2)
    settings = {"objective": objective(BOTH, by_sequence=by_sequence), "lora": tiny.lora(), "dtype": torch.float32}
    found = []
    for made in (tiny.engine(**settings), tiny.engine(device="cuda", cuda_graphs=True, **settings)):
        figures = [made.train_step(batches, step=step, lr=1e-2).figures() for step in range(3)]
        made.evaluate(batches)
        made.evaluate(batches)
        found.append([*figures, dict(made.evaluated)])
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_a_figure_may_have_a_count_of_its_own() -> None:
    """A step without anything to count has no such figure."""

    def sums(loss_N: Tensor, positions_N: Tensor, columns: Columns) -> list[Tensor]:
        return [torch.tensor(4.0), torch.tensor(3.0), torch.tensor(6.0), torch.tensor(0.0), torch.tensor(5.0)]

    names = ("answers", "chosen", "rewards/chosen", "rejected", "rewards/rejected")
    made = Objective(
        name="judged",
        token_loss=token_loss,
        figures=names,
        sequence_figures=sums,
        counts={"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    )
    engine = tiny.engine(objective=made)
    result = engine.train_step([tiny.batches(0)[0]] * 2, step=0, lr=0.0)
    assert result.figures() == {"answers": 8.0, "chosen": 6.0, "rewards/chosen": 2.0, "rejected": 0.0}
    with pytest.raises(TypeError, match="`counts` names figures"):
        replace(made, counts={"rewards/margin": "chosen"})
