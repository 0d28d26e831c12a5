"""Letters to copy, as they are or backwards."""

from __future__ import annotations

from surogate_core.plugin import UserError, bundles
from surogate_environments.options import CopyOptions
from surogate_reinforcement.answers import visible
from surogate_reinforcement.draws import Draws
from surogate_reinforcement.episodes import OneReply, user_says


class Copying:
    """Problems without an end: `length` letters of `alphabet`."""

    size = None

    def __init__(self, options: CopyOptions, *, backwards: bool = False) -> None:
        self._options, self._backwards = options, backwards
        self._shortest = options.length if options.min_length is None else options.min_length
        if self._shortest > options.length:
            raise UserError(
                f"environment.min_length: is {self._shortest}, and environment.length {options.length}. "
                f"Fix: a smaller min_length"
            )

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        draws, options = Draws(seed, number), self._options
        letters = [draws.choice(options.alphabet) for _ in range(draws.between(self._shortest, options.length))]
        right = letters[::-1] if self._backwards else letters
        text = options.prompt.replace("{text}", options.separator.join(letters))
        return bundles.EnvironmentProblem(messages=user_says(text), data={"answer": options.separator.join(right)})

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return OneReply(problem, _judged)


def _judged(problem: bundles.EnvironmentProblem, text: str) -> bundles.Rewards:
    right, found = _letters(problem.data["answer"]), _letters(visible(text))
    same = sum(a == b for a, b in zip(right, found, strict=False))
    return {"match": same / max(len(right), len(found)), "exact": float(right == found)}


def _letters(text: str) -> list[str]:
    return [letter for letter in text if not letter.isspace()]
