"""`rollouts.jsonl`: every completion of a run with its rewards, one a line.

Equal runs write equal bytes. A resumed run cuts the file back to its checkpoint first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surogate_task_grpo.play import Played
from surogate_task_grpo.rollout import Generation, conversation_text

NAME = "rollouts.jsonl"


class CompletionLog:
    """Appends the completions of each step."""

    def __init__(self, directory: Path):
        self.path = directory / NAME
        self.bytes = 0
        """Length of the file after the last step."""
        self._begun = False

    def append(self, step: int, generation: Generation) -> None:
        """Write the completions of a step."""
        data = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in _lines(step, generation)).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            if not self._begun:
                # What a killed run wrote after its last checkpoint is written again.
                self.bytes = min(self.bytes, file.seek(0, 2))
                self._begun = True
            file.truncate(self.bytes)
            file.seek(self.bytes)
            file.write(data)
        self.bytes += len(data)

    def sync(self) -> None:
        """Return when the lines are on the disk: a checkpoint that counts them must not outlive them."""
        if self._begun:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())


def _lines(step: int, generation: Generation) -> Iterator[dict[str, Any]]:
    for group in generation.groups:
        for place, one in enumerate(group.played):
            yield {
                "step": step,
                "prompt": group.number,
                "completion": place,
                "messages": list(one.problem.messages) if one.problem is not None else [],
                "text": conversation_text(one),
                "reward": one.reward,
                "rewards": dict(one.rewards),
                "advantage": group.advantages[place] if group.kept else None,
                "reason": one.reason,
                "length": one.length,
                "samples": list(_samples(one)),
            }


def _samples(one: Played) -> Iterator[dict[str, Any]]:
    """The tokens, and the places of those that the model sampled as [start, end)."""
    for sample in one.samples:
        spans: list[list[int]] = []
        for place, trained in enumerate(sample.trained):
            if trained and spans and spans[-1][1] == place:
                spans[-1][1] = place + 1
            elif trained:
                spans.append([place, place + 1])
        yield {"ids": list(sample.ids), "sampled": spans}
