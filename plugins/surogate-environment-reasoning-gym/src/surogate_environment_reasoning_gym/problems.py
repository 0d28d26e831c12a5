"""Problems and scores of reasoning-gym."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from surogate_core.plugin import UserError, bundles
from surogate_environment_reasoning_gym.options import ReasoningGymOptions
from surogate_reinforcement.answers import tagged, visible
from surogate_reinforcement.draws import Draws
from surogate_reinforcement.episodes import OneReply, user_says

CHUNK = 500
"""Problems of one seed. A data set of reasoning-gym has a size, and some make all problems when they are created."""


class ReasoningGym:
    """Data sets of reasoning-gym without an end: each `CHUNK` of problems has a seed of its own."""

    size = None

    def __init__(self, options: ReasoningGymOptions) -> None:
        self._options = options
        self._configs = _configs(options)
        for name in options.dataset:
            # Mistakes in parameters are found before the first problem.
            self._dataset(name, 0, 0)
        self._dataset = lru_cache(maxsize=16)(self._dataset)  # type: ignore[method-assign]

    def problem(self, number: int, seed: int) -> bundles.EnvironmentProblem:
        name, entry = self._entry(number, seed)
        question = str(entry["question"])
        system = ({"role": "system", "content": self._options.system},) if self._options.system else ()
        messages = (*system, *user_says(self._options.prompt.replace("{question}", question)))
        answer = str(entry["answer"])
        # `surogate env check` plays the answer as a reply.
        right = f"<answer>{answer}</answer>" if self._options.answer == "tag" else answer
        data = {"dataset": name, "number": number, "seed": seed, "question": question, "answer": right}
        return bundles.EnvironmentProblem(messages=messages, data=data)

    def start(self, problem: bundles.EnvironmentProblem) -> bundles.Episode:
        return OneReply(problem, self._judged)

    # ----------------------------------------------------------------------------- judge

    def _judged(self, problem: bundles.EnvironmentProblem, reply: str) -> Mapping[str, float | None]:
        """`score` is that of the data set; `failed` says that it could not score the answer."""
        shown = visible(reply)
        answer = tagged(shown) if self._options.answer == "tag" else shown.strip()
        number, seed = int(problem.data["number"]), int(problem.data["seed"])
        # The entry is made again: its metadata need not be JSON.
        name, entry = self._entry(number, seed)
        if str(entry["question"]) != problem.data["question"]:
            raise RuntimeError(f"data set {name} made another problem {number} of the same seed, so it does not repeat")
        failed = False
        score: Any = 0.0
        if answer:
            try:
                score = float(self._of(name, number, seed).score_answer(answer, entry))
            except Exception:  # an answer that the data set cannot read is a wrong answer
                failed = True
        if failed or not math.isfinite(score):
            score, failed = 0.0, True
        return {"score": score, "answered": float(bool(answer)), "failed": float(failed)}

    # ----------------------------------------------------------------------------- problems

    def _entry(self, number: int, seed: int) -> tuple[str, Mapping[str, Any]]:
        names = self._options.dataset
        name = names[0]
        if len(names) > 1:
            name = names[_drawn(Draws(seed, number, 1), self._options.weights or [1.0] * len(names))]
        return name, self._of(name, number, seed)[number % CHUNK]

    def _of(self, name: str, number: int, seed: int) -> Any:
        return self._dataset(name, number // CHUNK, seed)

    def _dataset(self, name: str, chunk: int, seed: int) -> Any:
        import reasoning_gym

        config = {"size": CHUNK, **self._configs[name], "seed": Draws(seed, chunk, 0).below(2**32)}
        try:
            return reasoning_gym.create_dataset(name, **config)
        except (TypeError, ValueError, AssertionError) as error:
            text = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"environment.config: data set {name} of reasoning-gym refuses its parameters: {text}"
            ) from error


def _configs(options: ReasoningGymOptions) -> Mapping[str, Mapping[str, Any]]:
    """Data set → its parameters. Raises `UserError` for names, weights and parameters that cannot be."""
    from reasoning_gym.factory import DATASETS

    names = options.dataset
    for name in names:
        if name not in DATASETS or name == "composite":
            near = get_close_matches(name, DATASETS, n=1, cutoff=0.4)
            known = f"there are {len(DATASETS)}, such as {', '.join(sorted(DATASETS)[:3])}"
            fix = f" Fix: {near[0]}" if near else ""
            raise UserError(f"environment.dataset: reasoning-gym has no data set {name!r}; {known}.{fix}")
    if len(set(names)) < len(names):
        raise UserError("environment.dataset: a data set is named twice. Fix: name it once, with a larger weight")
    if options.weights and len(options.weights) != len(names):
        raise UserError(f"environment.weights: {len(options.weights)} weights for {len(names)} data sets")
    if len(names) == 1:
        found = {names[0]: options.config}
    else:
        found = {name: options.config.get(name, {}) for name in names}
        wrong = [key for key in options.config if key not in names]
        wrong += [name for name, config in found.items() if not isinstance(config, Mapping)]
        if wrong:
            raise UserError(
                f"environment.config: {wrong[0]} is no data set with its parameters. "
                f"Fix: {{{names[0]}: {{PARAMETER: VALUE}}}}"
            )
    for name, config in found.items():
        if own := sorted({"seed", "size"} & set(config)):
            raise UserError(
                f"environment.config: {own[0]} of {name} is set by the run. Fix: remove it; train_seed decides"
            )
    return found


def _drawn(draws: Draws, weights: list[float]) -> int:
    """The number of a weight, drawn with that share."""
    place = draws.below(2**53) / 2**53 * math.fsum(weights)
    for index, weight in enumerate(weights):
        place -= weight
        if place < 0:
            return index
    return len(weights) - 1
