"""The reward model of a run: a second, frozen model whose score of each conversation is one of its rewards.

Scores are computed in micro-batches of one size, in the order of the completions.

Shape suffixes: N tokens of a micro-batch, D documents.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from surogate_core.plugin import (
    ConfigError,
    ModelDir,
    Problem,
    UserError,
    atomic,
    bundles,
    events,
    inference,
    locate,
    second_model,
)
from surogate_task_grpo.forward import shared_values
from surogate_task_grpo.packing import Document, Shape, arranged, micro_batch

KEY = "reward_model"
NAME = KEY
"""The name of its score among the rewards."""
FAULT = "reward_model"
"""The reason of an episode whose score is not a number."""
LM_HEAD = "lm_head.weight"
"""What an adapter with a head of its own does not use of its base."""
ALIGNED = 64
"""Rows are as long as a multiple of this."""


class RewardModel:
    """A reward model; `load` reads its weights."""

    def __init__(self, word: str, context: bundles.OnlineContext, shape: Shape, ending: Sequence[int]):
        """`word`: what the user names. `shape`: the rows of the run. `ending`: the tokens behind a finished reply.

        Raises `ConfigError` for a model that is no reward model, has several labels, another tokenizer or too few
        positions, and `UserError` for one that cannot be used otherwise.
        """
        self._context, self._word, self._ending = context, word, tuple(ending)
        self._prepared = second_model.open_reward_model(KEY, word, context.config, context.registry)
        self._check(shape.sequence_len)
        length = -(-(shape.sequence_len + len(self._ending)) // ALIGNED) * ALIGNED
        self._shape = replace(shape, sequence_len=length, columns=())
        self._weights: bundles.ModelWeights | None = None

    def _check(self, sequence_len: int) -> None:
        theirs = self._prepared.tokenizer
        fix = "a reward model trained on the same model family"
        second_model.check_tokenizer(KEY, self._context.tokenizer, theirs, word=self._word, fix=fix)
        room = self._prepared.context - len(self._ending)
        if sequence_len > room:
            message = (
                f"{self._word} reads up to {int(self._prepared.context):,} tokens, and a conversation may have "
                f"{sequence_len + len(self._ending):,}."
            )
            raise ConfigError([Problem(key=KEY, message=message, fix=f"sequence_len={int(room)}")])

    @cached_property
    def digest(self) -> str:
        """Digest of its weights, adapters and dtype."""
        return second_model.digest(self._prepared)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about it."""
        notes = [f"{KEY}: {note}" for note in self._prepared.notes]
        own, theirs = (one.chat_template for one in (self._context.tokenizer, self._prepared.tokenizer))
        if theirs and own != theirs:
            notes.append(
                f"{KEY}: {self._word} has another chat template than the model, whose template writes what it "
                f"scores. If it was trained with its own, set `template` to that one."
            )
        return tuple(notes)

    def load(self) -> None:
        """Read the weights."""
        emit = self._context.emit
        self._weights = self._prepared.load(
            self._context.registry,
            progress=lambda task, done, total: emit(events.Progress(task=f"{KEY}: {task}", done=done, total=total)),
        )

    def ended(self, ids: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
        """A conversation as the reward model was trained on it: its last reply ends as the chat template ends one.

        A reply that was cut short is ended too.
        """
        ids = list(ids)
        if ids and ids[-1] in stop_ids:
            ids.pop()
        return [*ids, *self._ending]

    def scores(self, conversations: Sequence[Sequence[int]]) -> list[float]:
        """[D]: the score at the last token of each. All ranks give the same. Raises `Stopped` after a signal."""
        assert self._weights is not None
        documents = [
            Document(ids_T=np.asarray(ids, np.int64), trained_T=np.zeros(len(ids), np.bool_)) for ids in conversations
        ]
        found = [math.nan] * len(documents)
        if not documents:
            return found
        batches = arranged([len(document) for document in documents], self._shape)
        places = [[place for row in rows for place in row] for rows in batches]
        lengths = [len(some) for some in places]
        values = shared_values(self._context.together, lengths, lambda part: self._scored(batches[part], documents))
        for some, scores in zip(places, values, strict=True):
            for place, score in zip(some, scores.tolist(), strict=True):
                found[place] = score
        return found

    def _scored(self, rows: Sequence[Sequence[int]], documents: Sequence[Document]) -> NDArray[np.float32]:
        """The scores of a micro-batch's documents, in the order of its rows."""
        assert self._weights is not None
        if self._context.stopped():
            raise bundles.Stopped
        batch = micro_batch([[documents[place] for place in row] for row in rows], self._shape, divisor=0.0)
        scores_N = torch.cat(
            [scores_N1[:, 0].float() for _, scores_N1 in inference.logits_of(self._weights, batch)]
        ).cpu()
        ends = []
        for number, row in enumerate(rows):
            end = number * self._shape.sequence_len
            for place in row:
                end += len(documents[place])
                ends.append(end - 1)
        return scores_N.numpy()[ends]


def with_room(rewards: Mapping[str, float | None]) -> dict[str, float | None]:
    """An episode's rewards with None for the score. Raises `UserError` if the environment has a reward of its name."""
    if NAME in rewards:
        raise UserError(
            f"{KEY}: the environment has a reward of the name {NAME}, so its score would have the same name. "
            f"Fix: rename the environment's reward, or leave {KEY} out."
        )
    return {**rewards, NAME: None}


def needed(word: str, dtype: torch.dtype) -> tuple[int, str]:
    """(bytes of the weights of a reward model, a sentence about them), from the headers of its files alone."""
    path, revision = second_model.named_model(KEY, word).base
    files = ModelDir.open(locate(path, revision=revision, key=KEY))
    nbytes = sum(math.prod(files.shape(name)) for name in files.names() if name != LM_HEAD) * dtype.itemsize
    return nbytes, f"the weights of the reward model need {atomic.human_bytes(nbytes)} too"
