"""An environment in this process, for runs in which the environment's own processes do not matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from surogate_core.bundles import EnvironmentProblem, Turn


class Lengths:
    """The reward is the share of even characters, of one reply or of two."""

    size, held_out = 7, 3

    def __init__(self, name: str, turns: int):
        self.spec = SimpleNamespace(name=name, weights={}, deterministic=True)
        self._turns = turns
        self._replies: dict[Any, list[str]] = {}

    def problems(self, numbers: Sequence[int], seed: int) -> list[EnvironmentProblem]:
        return [EnvironmentProblem(messages=({"role": "user", "content": f"Say {n}"},)) for n in numbers]

    def start(self, episodes: Sequence[tuple[Any, EnvironmentProblem]], *, groups: Sequence[Any]) -> None:
        self._replies |= {key: [] for key, _ in episodes}

    def reply(self, replies: Sequence[tuple[Any, str]]) -> list[Turn]:
        for key, text in replies:
            self._replies[key].append(text)
        more = ({"role": "user", "content": "More"},)
        done = [len(self._replies[key]) >= self._turns for key, _ in replies]
        return [Turn(messages=() if last else more, done=last) for last in done]

    def rewards(self, keys: Sequence[Any]) -> list[Mapping[str, float]]:
        texts = ["".join(self._replies.pop(key)) for key in keys]
        return [{"even": sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)} for text in texts]

    def forget(self, keys: Sequence[Any]) -> None:
        for key in keys:
            del self._replies[key]

    def close(self) -> None:
        pass
