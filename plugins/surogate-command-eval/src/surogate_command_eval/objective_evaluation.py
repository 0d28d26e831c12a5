"""Held-out loss and figures of a model under the objective of its task, such as a reward model's.

Shape suffixes: N tokens of a micro-batch, V vocabulary, F figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from surogate_core.plugin import ReferencedTask, UserError, bundles, inference
from surogate_core.service.engine import of_chunk, of_sequences
from surogate_core.service.kernels import using

if TYPE_CHECKING:
    from surogate_core.plugin import MicroBatch
    from surogate_core.service.inference import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of a model on the held-out rows."""

    loss: float
    """Mean over what the objective counts: tokens, or pairs."""
    figures: dict[str, float]
    """Those that the objective names."""
    documents: int
    label_tokens: int


def refuse_references(task: bundles.Task, name: str) -> None:
    """Raise `UserError` if the task compares with the model from before a run's first step."""
    if isinstance(task, ReferencedTask):
        raise UserError(
            f"surogate eval: task {name} compares with the model from before its first step, which only the run knows; "
            f"its held-out loss and figures are in its report. Fix: task=sft and datasets=FILE.jsonl for the loss on "
            f"texts, or --tasks FILE.jsonl"
        )


@torch.no_grad()
def measured(
    task: bundles.Task,
    objective: bundles.Objective,
    weights: Weights,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """The loss and the figures over the held-out rows; raises `UserError` if there are none."""
    held_out = task.evaluation()
    if held_out is None:
        raise UserError("surogate eval: nothing is held out. Fix: name the rows to evaluate, datasets=FILE.jsonl")
    loss = divisor = 0.0
    documents = label_tokens = 0
    sums: list[float] = []
    for number, batch in enumerate(held_out, start=1):
        own, figures = _of_batch(objective, weights, batch)
        loss, divisor = loss + own, divisor + batch.loss_weight
        labelled_N = batch.labels >= 0
        numbers_N = (batch.positions == 0).cumsum(0)
        documents, label_tokens = documents + len(numbers_N[labelled_N].unique()), label_tokens + batch.label_tokens
        sums = _joined(objective, [sums, figures]) if sums else figures
        progress(number, len(held_out))
    return Measured(
        loss=loss / divisor,
        figures=objective.means(sums, label_tokens=label_tokens),
        documents=documents,
        label_tokens=label_tokens,
    )


def _joined(objective: bundles.Objective, parts: Sequence[Sequence[float]]) -> list[float]:
    """Each figure over several parts: the sum, or the maximum."""
    by_name = zip(objective.figures, zip(*parts, strict=True), strict=False)
    return [max(values) if name in objective.largest else math.fsum(values) for name, values in by_name]


def _of_batch(objective: bundles.Objective, weights: Weights, batch: MicroBatch) -> tuple[float, list[float]]:
    """(the summed loss, the sums of the figures) of a micro-batch."""
    device = weights.device
    columns = {name: column.to(device) for name, column in batch.columns.items()}
    losses, tokens = [], []
    with using(weights.programs.kernels):
        for part, logits_NV in inference.logits_of(weights, batch):
            own = {name: column[part] for name, column in columns.items()}
            labels_N = batch.labels[part].to(device)
            losses.append(objective.token_loss(logits_NV, labels_N, own))
            tokens += of_chunk(objective, logits_NV, labels_N, own)
        loss_N, positions_N = torch.cat(losses), batch.positions.to(device)
        figures = _joined(objective, [values.tolist() for values in tokens])
        if objective.sequence_figures is not None:
            figures += of_sequences(objective, loss_N, positions_N, columns).tolist()
        if objective.sequence_loss is not None:
            return float(objective.sequence_loss(loss_N, positions_N, columns)), figures
        weight_N = columns.get("weights")
        return float((loss_N if weight_N is None else loss_N * weight_N).double().sum()), figures
