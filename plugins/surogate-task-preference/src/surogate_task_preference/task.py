"""The tasks: packed pairs, with the columns that tell their answers apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import IGNORE_LABEL, MicroBatch, PackedTask, ReferencedTask, bundles
from surogate_task_preference.options import DPOOptions, IPOOptions, ORPOOptions, SimPOOptions

if TYPE_CHECKING:
    from surogate_core.plugin import PackedRows, PreparedData


class PairTask(PackedTask):
    """Pairs for a loss without a reference."""

    def __init__(self, config: bundles.RunKeys, data: PreparedData, *, lengths: bool):
        """`lengths`: whether the loss reads the number of trained tokens."""
        super().__init__(config, data)
        self._lengths = lengths

    def make(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch with the columns."""
        return of_pairs(super().make(rows, indices), rows.sequence_len, lengths=self._lengths)


class ReferencedPairTask(ReferencedTask):
    """Pairs for a loss that compares with the model of step 0."""

    def __init__(self, config: bundles.RunKeys, data: PreparedData, *, lengths: bool):
        """`lengths`: whether the loss reads the number of trained tokens."""
        super().__init__(config, data)
        self._lengths = lengths

    def unreferenced(self, rows: PackedRows, indices: Sequence[int | None]) -> MicroBatch:
        """The micro-batch with the columns, without the values of the reference."""
        return of_pairs(super().unreferenced(rows, indices), rows.sequence_len, lengths=self._lengths)


def of_pairs(batch: MicroBatch, sequence_len: int, *, lengths: bool) -> MicroBatch:
    """A micro-batch of rows of pairs, whose loss is divided by their number, with the columns of the objectives."""
    from surogate_task_preference.objectives import PREFERRED, TRAINED

    assert batch.real is not None
    # Documents of a row alternate: chosen, rejected.
    starts_RL = (batch.positions == 0).view(-1, sequence_len)
    side_N = (1 - 2 * ((starts_RL.cumsum(1) - 1) % 2)).float().flatten()
    columns = {**batch.columns, PREFERRED: side_N * batch.real}
    if lengths:
        columns[TRAINED] = (batch.labels != IGNORE_LABEL).float()
    documents_R = (starts_RL & batch.real.view(-1, sequence_len)).sum(1)
    assert not (documents_R % 2).any(), "a row has a document without its partner"
    return replace(batch, columns=columns, divisor=int(documents_R.sum()) / 2)


def _dpo(config: bundles.RunKeys, data: PreparedData, options: DPOOptions) -> PackedTask:
    lengths = options.loss_type == "ipo" or options.sft_weight > 0
    kind = PairTask if options.reference_free else ReferencedPairTask
    return kind(config, data, lengths=lengths)


def _ipo(config: bundles.RunKeys, data: PreparedData, options: IPOOptions) -> PackedTask:
    return ReferencedPairTask(config, data, lengths=True)


def _without_reference(config: bundles.RunKeys, data: PreparedData, options: Any) -> PackedTask:
    return PairTask(config, data, lengths=True)


def _objective(name: str) -> Any:
    def build(options: Any) -> bundles.Objective:
        from surogate_task_preference import objectives

        found: bundles.Objective = getattr(objectives, name)(options)
        return found

    return build


TASKS = (
    bundles.TaskSpec(name="dpo", build=_dpo, options=DPOOptions, objective=_objective("dpo"), group=2),
    bundles.TaskSpec(name="ipo", build=_ipo, options=IPOOptions, objective=_objective("ipo"), group=2),
    bundles.TaskSpec(name="orpo", build=_without_reference, options=ORPOOptions, objective=_objective("orpo"), group=2),
    bundles.TaskSpec(
        name="simpo", build=_without_reference, options=SimPOOptions, objective=_objective("simpo"), group=2
    ),
)
