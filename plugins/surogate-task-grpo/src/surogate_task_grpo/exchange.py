"""What the ranks of a run tell each other of a step: the episodes that each has played.

Each rank plays whole groups: prompt i of a call is that of rank i modulo the ranks. All ranks then have all episodes,
in the order of the prompts, and decide alike.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surogate_core.plugin import bundles
from surogate_task_grpo.play import Played, TrainedSequence

_HEAD = struct.Struct("=Q")
_FIELDS = ("replies", "answers", "reason", "fault", "detail", "rewards", "length", "used")


def gathered(
    together: bundles.Together, play: Callable[[], list[Played]], *, prompts: int, samples: int
) -> list[Played]:
    """The episodes of all ranks, `samples` of each prompt, in the order of the prompts; `play` gives this rank's.

    Those of other ranks have what is trained on and recorded, and no state of the conversation. Raises `Stopped` on all
    ranks if a signal came.
    """
    if together.world == 1:
        return play()
    by_rank = [unpacked(data) for data in together.gather(lambda: packed(play()))]
    found: list[Played] = []
    for number in range(prompts):
        place = number // together.world * samples
        found += by_rank[number % together.world][place : place + samples]
    return found


def packed(played: Sequence[Played]) -> bytes:
    """Episodes without rewards in sum, as bytes."""
    head = [
        {
            "key": one.key,
            "messages": None if one.problem is None else list(one.problem.messages),
            "samples": [len(sample.ids) for sample in one.samples],
            **{name: getattr(one, name) for name in _FIELDS},
        }
        for one in played
    ]
    samples = [sample for one in played for sample in one.samples]
    values: tuple[NDArray[Any], ...] = (
        np.array([token for sample in samples for token in sample.ids], np.int32),
        np.array([logprob for sample in samples for logprob in sample.logprobs], np.float64),
        np.array([kept for sample in samples for kept in sample.trained], np.bool_),
    )
    body = json.dumps(head).encode()
    return b"".join([_HEAD.pack(len(body)), body, *(value.tobytes() for value in values)])


def unpacked(data: bytes) -> list[Played]:
    """What `packed` was given."""
    (length,) = _HEAD.unpack_from(data)
    head = json.loads(data[_HEAD.size : _HEAD.size + length])
    total = sum(count for one in head for count in one["samples"])
    at, columns = _HEAD.size + length, []
    for dtype in (np.dtype(np.int32), np.dtype(np.float64), np.dtype(np.bool_)):
        columns.append(np.frombuffer(data, dtype, total, at).tolist())
        at += total * dtype.itemsize
    ids, logprobs, trained = columns
    found, begin = [], 0
    for one in head:
        samples = []
        for count in one["samples"]:
            part = slice(begin, begin + count)
            samples.append(TrainedSequence(ids=tuple(ids[part]), trained=trained[part], logprobs=logprobs[part]))
            begin += count
        problem = None if one["messages"] is None else bundles.EnvironmentProblem(messages=tuple(one["messages"]))
        number, sample = one["key"]
        values = {name: one[name] for name in _FIELDS}
        found.append(Played(key=(number, sample), problem=problem, samples=samples, **values))
    return found
