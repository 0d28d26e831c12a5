"""Held-out loss and perplexity of models on data sets, with standard errors, and pairs of models compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from surogate_command_eval.objective_evaluation import measured, refuse_references
from surogate_core.plugin import UserError, bundles, events, inference
from surogate_core.service.config import RunConfig, encode
from surogate_core.service.data import EvalBatches, pipeline
from surogate_core.service.inference import DocumentSums, documents_of, placed
from surogate_core.service.setup import objective_of, task_spec
from surogate_core.service.training import ratio_stderr, refuse_nan

if TYPE_CHECKING:
    from surogate_core.service.inference import Weights
    from surogate_core.service.plugins import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFigures:
    """A model's figures on the held-out rows."""

    model: str
    """As it was named."""
    loss: float
    """Mean negative log-likelihood of a label token, in nats."""
    stderr: float
    """Standard error of the loss, from its spread over the documents; NaN for one document."""
    perplexity: float
    accuracy: float
    """Share of the label tokens that are the most probable ones."""
    documents: int
    label_tokens: int
    data: str
    """Digest of the rows; models with equal digests saw the same tokens."""
    difference: float | None = None
    """Loss minus that of the first model; None for the first, and where the tokens differ."""
    difference_stderr: float | None = None
    """Standard error of the difference, from the documents in pairs."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Further figures, if the task has an objective of its own. Then `loss` is the objective's, `accuracy` is the share
    of pairs whose chosen answer has the higher reward, and perplexity and standard error are NaN."""


def evaluate(
    name: str,
    prepared: inference.PreparedModel,
    registry: Registry,
    *,
    progress: Callable[[events.Progress], None],
    first: tuple[HeldOutFigures, Sequence[DocumentSums]] | None = None,
) -> tuple[HeldOutFigures, list[DocumentSums]]:
    """The model's figures and its documents. `first`: those of the model to compare with."""
    config = prepared.config
    spec = task_spec(config, registry)
    data = pipeline.prepare(
        config,
        prepared.tokenizer,
        registry.all("dataset"),
        trains_prompts=spec.trains_prompts,
        group=spec.group,
        progress=progress,
    )
    task = spec.task_of(config, data) if spec.objective is not None else None
    if task is not None:
        refuse_references(task, spec.name)
    if data.eval is None:
        raise UserError("surogate eval: nothing is held out. Fix: name the rows to evaluate, datasets=FILE.jsonl")
    weights = prepared.load(
        registry,
        progress=lambda task, done, total: progress(events.Progress(task=f"{name}: {task}", done=done, total=total)),
    )
    if task is not None and not isinstance(task, bundles.PreparingTask):
        return _by_objective(name, task, objective_of(config, registry), weights, data.eval.digest, progress), []
    batches = EvalBatches(data.eval, rows_per_micro_batch=config.per_device_train_batch_size)
    documents: list[DocumentSums] = []
    for done, found in enumerate(documents_of(weights, batches), start=1):
        refuse_nan(name, weights, found)
        documents += found
        progress(events.Progress(task=f"{name}: evaluating", done=done, total=len(batches), unit="micro-batches"))
    return _figures(name, documents, data.eval.digest, first), documents


def _by_objective(
    name: str,
    task: bundles.Task,
    objective: bundles.Objective,
    weights: Weights,
    digest: str,
    progress: Callable[[events.Progress], None],
) -> HeldOutFigures:
    """The figures under the objective of a task."""
    found = measured(
        task,
        objective,
        weights,
        lambda done, total: progress(
            events.Progress(task=f"{name}: evaluating", done=done, total=total, unit="micro-batches")
        ),
    )
    return HeldOutFigures(
        model=name,
        loss=found.loss,
        stderr=math.nan,
        perplexity=math.nan,
        accuracy=found.figures.get("rewards/accuracies", math.nan),
        documents=found.documents,
        label_tokens=found.label_tokens,
        data=digest,
        figures=found.figures,
    )


def evaluate_all(
    prepared: Mapping[str, inference.PreparedModel],
    registry: Registry,
    *,
    progress: Callable[[events.Progress], None] = lambda event: None,
) -> list[HeldOutFigures]:
    """The figures of several models, each compared with the first."""
    found: list[HeldOutFigures] = []
    first = None
    for name, one in prepared.items():
        figures, documents = evaluate(name, one, registry, progress=progress, first=first)
        first = first or ((figures, documents) if documents else None)
        found.append(figures)
    return found


SHARED = (
    "task",
    "datasets",
    "validation_datasets",
    "validation_split_ratio",
    "sequence_len",
    "sample_packing",
    "per_device_train_batch_size",
    "truncation_strategy",
    "max_length",
    "use_chat_template",
    "template",
    "system",
    "loss_scale",
    "max_bad_rows",
    "train_seed",
    "eval_seed",
)
"""Keys that decide which tokens a model reads. All models have those of the first run."""


def shared(config: RunConfig, *, run: bool) -> list[str]:
    """The overrides that give another model the rows of `config`. `run`: whether that model is a run."""
    rows = [f"{key}={encode(getattr(config, key))}" for key in SHARED]
    return rows if run else [*rows, *placed(config)]


def held_out(config: RunConfig, *, named: AbstractSet[str]) -> RunConfig:
    """The configuration whose held-out rows are to be evaluated. `named`: the keys that the user names now.

    All of `datasets` if that is named, unless `validation_datasets` is named too; otherwise what the run held out.
    """
    if "validation_datasets" in named or not named & {"datasets", "dataset"}:
        return config
    return replace(config, validation_datasets=config.datasets)


def _figures(
    name: str,
    documents: Sequence[DocumentSums],
    digest: str,
    first: tuple[HeldOutFigures, Sequence[DocumentSums]] | None,
) -> HeldOutFigures:
    weight = math.fsum(d.weight for d in documents)
    tokens = sum(d.tokens for d in documents)
    if not weight:
        raise UserError("surogate eval: no token of the data has a label. Fix: look at `surogate tokenize --debug`.")
    loss = math.fsum(d.loss for d in documents) / weight
    difference = difference_stderr = None
    if first is not None and first[0].data == digest:
        pairs = zip(documents, first[1], strict=True)
        difference = loss - first[0].loss
        difference_stderr = ratio_stderr([(a.loss - b.loss, a.weight) for a, b in pairs], difference)
    return HeldOutFigures(
        model=name,
        loss=loss,
        stderr=ratio_stderr([(d.loss, d.weight) for d in documents], loss),
        perplexity=math.exp(min(loss, 700)),
        accuracy=sum(d.hits for d in documents) / tokens,
        documents=len(documents),
        label_tokens=tokens,
        data=digest,
        difference=difference,
        difference_stderr=difference_stderr,
    )
