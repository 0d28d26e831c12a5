"""A loaded model that benchmarks are measured on: completions by a rollout engine, likelihoods by the model's forward.

Shape suffixes: N tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import RolloutEngineSpec
from surogate_core.data.packing import best_fit_decreasing
from surogate_core.errors import UserError
from surogate_core.events import Progress
from surogate_core.generate.losses import DocumentSums, documents_of
from surogate_core.generate.weights import Weights
from surogate_core.inference.generation import PreparedModel
from surogate_core.inference.texts import Prompt, PromptOptions, Text, generate_texts, requests_of, settings_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.plugins.registry import Registry

TOKENS = {"cpu": 512, "cuda": 8192}
"""Tokens of a micro-batch, unless a document is longer."""
ALIGNED = 64
"""Micro-batches are a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedText:
    """A text of whose end the model gives the likelihood."""

    name: str
    """Its name in messages."""
    context: tuple[int, ...]
    """At least one token."""
    continuation: tuple[int, ...]
    """At least one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """How probable a continuation is."""

    logprob: float
    """Sum over its tokens, in nats."""
    greedy: bool
    """Whether each token is the most probable one."""


def _batch(pairs: Sequence[JudgedText], size: int, borders: int) -> MicroBatch:
    """The pairs end to end, with padding up to `size` tokens. The last token of each is a label alone."""
    ids_N, labels_N = np.zeros(size, np.int64), np.full(size, IGNORE_LABEL, np.int64)
    positions_N, ends = np.zeros(size, np.int32), [0]
    for pair in pairs:
        whole, at = (*pair.context, *pair.continuation), ends[-1]
        end = at + len(whole) - 1
        ids_N[at:end] = whole[:-1]
        labels_N[at + len(pair.context) - 1 : end] = pair.continuation
        ends.append(end)
    tokens = ends[-1]
    for begin, end in zip(ends, [*ends[1:], size], strict=True):
        positions_N[begin:end] = np.arange(end - begin)
    cu_seqlens = np.full(borders, size, np.int32)
    cu_seqlens[: len(ends)] = ends
    return MicroBatch(
        input_ids=torch.from_numpy(ids_N),
        labels=torch.from_numpy(labels_N),
        positions=torch.from_numpy(positions_N),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=size,
        tokens=tokens,
        label_tokens=sum(len(pair.continuation) for pair in pairs),
        real=torch.from_numpy(np.arange(size) < tokens),
    )


class Subject:
    """A model that is measured."""

    def __init__(
        self,
        name: str,
        prepared: PreparedModel,
        weights: Weights,
        engine: RolloutEngineSpec,
        *,
        slots: int | None = None,
        progress: Callable[[Progress], None] = lambda event: None,
    ):
        self.name, self.prepared, self.weights = name, prepared, weights
        self._engine, self._slots, self._progress = engine, slots, progress

    @classmethod
    def load(
        cls,
        name: str,
        prepared: PreparedModel,
        registry: Registry,
        engine: RolloutEngineSpec,
        *,
        slots: int | None = None,
        progress: Callable[[Progress], None] = lambda event: None,
    ) -> Subject:
        """The model with its weights."""
        weights = prepared.load(
            registry,
            progress=lambda stage, done, total: progress(Progress(task=f"{name}: {stage}", done=done, total=total)),
        )
        return cls(name, prepared, weights, engine, slots=slots, progress=progress)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return self.prepared.tokenizer

    @property
    def context(self) -> float:
        """Tokens of the longest sequence; infinite if the model has no end."""
        return self.prepared.context

    def complete(
        self,
        prompts: Sequence[Prompt],
        wanted: PromptOptions,
        *,
        stage: str = "generating",
        finished: Callable[[Text], None] | None = None,
    ) -> list[Text]:
        """The completions of prompts, the samples of each prompt together."""
        requests, _ = requests_of(self.prepared, prompts, wanted)
        if not requests:
            return []
        engine = self._engine.open(self.weights, settings_of(self.weights, requests, slots=self._slots))
        try:
            return generate_texts(
                engine,
                self.tokenizer,
                requests,
                wanted.stop,
                progress=lambda done, total: self._tell(stage, done, total, "tokens"),
                finished=finished,
            )
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error

    def likelihoods(self, pairs: Sequence[JudgedText], *, stage: str = "likelihoods") -> list[Likelihood]:
        """How probable each continuation is. Raises `UserError` for a document beyond the model's positions."""
        found: list[Likelihood | None] = [None] * len(pairs)
        for index, document in self._documents(pairs, stage):
            found[index] = Likelihood(logprob=-document.loss, greedy=document.hits == document.tokens)
        return [one for one in found if one is not None]

    def _documents(self, pairs: Sequence[JudgedText], stage: str) -> Sequence[tuple[int, DocumentSums]]:
        """(number of a pair, its sums)."""
        if not pairs:
            return []
        lengths = [len(pair.context) + len(pair.continuation) - 1 for pair in pairs]
        longest = max(lengths)
        if longest > self.prepared.context:
            name, end = pairs[lengths.index(longest)].name, int(self.prepared.context)
            raise UserError(
                f"{name}: has {longest:,} tokens before its last one, and the model's positions end at {end:,}. "
                f"Fix: shorten it, fewer --shots, or stretch the model with rope_scaling and max_model_len."
            )
        size = max(longest, min(sum(lengths), TOKENS.get(self.weights.device.type, 512)))
        size = -(-size // ALIGNED) * ALIGNED
        bins = best_fit_decreasing(lengths, size)
        borders = max(map(len, bins)) + 2
        batches = (_batch([pairs[index] for index in some], size, borders) for some in bins)
        found: list[tuple[int, DocumentSums]] = []
        for number, documents in enumerate(documents_of(self.weights, batches)):
            refuse_nan(self.name, self.weights, documents)
            found += zip(bins[number], documents, strict=True)
            self._tell(stage, number + 1, len(bins), "micro-batches")
        return found

    def _tell(self, stage: str, done: int, total: int, unit: str) -> None:
        self._progress(Progress(task=f"{self.name}: {stage}", done=done, total=total, unit=unit))


def refuse_nan(name: str, weights: Weights, documents: Sequence[DocumentSums]) -> None:
    """Raise `UserError` if a loss is no number, with the first weight that is none."""
    if all(np.isfinite(document.loss) for document in documents):
        return
    weight = weights.not_finite()
    what = (
        f"{weight} has NaN or infinity"
        if weight
        else f"the weights are finite, but not the logits in {weights.parameters.dtype}"
    )
    raise UserError(
        f"{name}: the loss is not a number: {what}. Fix: use weights of a run that did not diverge, or another "
        f"model_dtype"
    )
