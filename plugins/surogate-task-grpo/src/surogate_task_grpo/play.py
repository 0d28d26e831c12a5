"""Episodes: a model's replies and an environment's answers, until the environment is done or the room is used up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import RowError, UserError, bundles
from surogate_task_grpo.conversation import Renderer
from surogate_task_grpo.reward_model import FAULT, NAME, RewardModel, with_room

if TYPE_CHECKING:
    from surogate_reinforcement.pool import EnvironmentPool

Key = tuple[int, int]
"""(number of the prompt in the run, number of the completion)."""
TEMPLATE = "template"
"""Reason of an episode whose messages the chat template refuses."""
TOO_LONG = "prompt_too_long"
"""Reason of an episode whose prompt leaves no room in a row for a completion."""
TURN = 2**32
"""Added to a completion's number in the key of its random choices for each turn before."""


@dataclass(slots=True, kw_only=True)
class TrainedSequence:
    """A sequence of tokens to train on."""

    ids: tuple[int, ...]
    trained: list[bool]
    """Whether the model sampled the token."""
    logprobs: list[float]
    """The log-probability that the rollout engine gave each sampled token; 0 for the others."""

    @classmethod
    def of(cls, prompt: tuple[int, ...]) -> TrainedSequence:
        """A sample that begins with a prompt."""
        return cls(ids=prompt, trained=[False] * len(prompt), logprobs=[0.0] * len(prompt))

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens, which the model sampled if they have log-probabilities."""
        self.ids += tuple(ids)
        self.trained += [logprobs is not None] * len(ids)
        self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs


@dataclass(slots=True, kw_only=True)
class Played:
    """An episode."""

    key: Key
    problem: bundles.EnvironmentProblem | None
    """None if the environment had none."""
    samples: list[TrainedSequence] = field(default_factory=list)
    """One, and another for each time that the chat template changed earlier turns."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """The conversation so far."""
    replies: list[str] = field(default_factory=list)
    answers: list[list[Mapping[str, Any]]] = field(default_factory=list)
    """The environment's messages after each reply."""
    reason: str = ""
    """``stop``, ``length``, ``turns``, or the reason of a fault."""
    fault: bool = False
    detail: str = ""
    """What the environment said about the fault, in one line."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    length: int = 0
    """Tokens that the model sampled."""
    used: int = 0
    """The same with those of the environment's answers."""

    @property
    def truncated(self) -> bool:
        """Whether it ended for lack of room or turns."""
        return self.reason in ("length", "turns")

    def fail(self, reason: str, detail: str = "") -> None:
        """It has no result."""
        self.reason, self.fault, self.detail = reason, True, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """How long episodes may be."""

    completion: int
    """Tokens of all turns of an episode, without the prompt."""
    sequence: int
    """Tokens of a sample."""
    turns: int


@dataclass(slots=True, kw_only=True)
class Player:
    """Plays episodes."""

    engine: bundles.RolloutEngine
    arena: EnvironmentPool
    renderer: Renderer
    limits: EpisodeLimits
    weights: Mapping[str, float]
    """Name of a reward → its weight in the sum."""
    lap: Callable[[str], None]
    """Receives the name of a phase when it ends."""
    judge: RewardModel | None = None

    def play(
        self,
        problems: Sequence[tuple[int, bundles.EnvironmentProblem | bundles.Fault]],
        samples: int,
        sampling: bundles.Sampling,
        on_token: Callable[[int], None],
    ) -> list[Played]:
        """Episodes of (number, problem), `samples` of each, with the rewards of the environment, but not their sums.

        `on_token` receives the most tokens that are still to come. It may raise.
        """
        played = [Played(key=(number, s), problem=None) for number, _ in problems for s in range(samples)]
        found = (problem for _, problem in problems for _ in range(samples))
        going = [one for one, problem in zip(played, found, strict=True) if self._seat(one, problem)]
        self._start(going)
        self.lap("environment")
        turn = 0
        while going:
            self._generate(going, turn, sampling, on_token)
            self.lap("generate")
            going = self._answer(going)
            self.lap("environment")
            turn += 1
        self.arena.forget([one.key for one in played if one.fault and one.samples and one.replies])
        self._reward([one for one in played if not one.fault])
        self.lap("score")
        return played

    def judged(self, played: Sequence[Played]) -> None:
        """Add the scores of the reward model, and sum up the rewards, of the episodes of all ranks."""
        if self.judge is not None:
            self._score([one for one in played if _is_judged(one)], self.judge)
            self.lap("reward_model")
        for one in played:
            one.reward = None if one.fault else bundles.total_reward(one.rewards, self.weights)

    def _seat(self, one: Played, problem: bundles.EnvironmentProblem | bundles.Fault) -> bool:
        """Whether the episode can begin."""
        if isinstance(problem, bundles.Fault):
            one.fail(problem.reason, problem.detail)
            return False
        one.problem = problem
        try:
            prompt = self.renderer.prompt(problem)
        except RowError as error:
            one.fail(TEMPLATE, str(error))
            return False
        one.samples, one.messages = [TrainedSequence.of(prompt)], self.renderer.messages(problem)
        if not prompt:
            one.fail("empty_prompt")
        elif self._room(one) < 1:
            one.fail(TOO_LONG, f"{len(prompt):,} tokens, and a row has {self.limits.sequence:,}")
        return not one.fault

    def _start(self, going: Sequence[Played]) -> None:
        seated = [(one.key, one.problem) for one in going if one.problem is not None]
        self.arena.start(seated, groups=[number for (number, _), _ in seated])

    def _room(self, one: Played) -> int:
        """The most tokens that the model may still sample."""
        return min(self.limits.completion - one.used, self.limits.sequence - len(one.samples[-1].ids))

    def _generate(
        self, going: Sequence[Played], turn: int, sampling: bundles.Sampling, on_token: Callable[[int], None]
    ) -> None:
        requests = [
            bundles.Request(
                prompt=one.samples[-1].ids,
                max_new_tokens=self._room(one),
                number=one.key[0],
                sample=one.key[1] + turn * TURN,
                sampling=sampling,
                stop_ids=self.renderer.stop_ids,
            )
            for one in going
        ]
        left = sum(request.max_new_tokens for request in requests)
        rooms = [request.max_new_tokens for request in requests]

        def take(index: int, token: int) -> bool:
            nonlocal left
            rooms[index] -= 1
            left -= 1
            if token in self.renderer.stop_ids:
                left -= rooms[index]
            on_token(left)
            return False

        for one, completion in zip(going, self.engine.generate(requests, on_token=take), strict=True):
            prompt = one.samples[-1].ids
            one.samples[-1].add(completion.ids, completion.logprobs)
            one.length += len(completion.ids)
            one.used += len(completion.ids)
            one.reason = completion.reason
            one.replies.append(self.renderer.text(prompt, completion.ids))

    def _answer(self, going: Sequence[Played]) -> list[Played]:
        """The episodes that go on after the environment has answered."""
        answers = self.arena.reply([(one.key, one.replies[-1]) for one in going])
        return [one for one, answer in zip(going, answers, strict=True) if self._goes_on(one, answer)]

    def _goes_on(self, one: Played, answer: bundles.Turn | bundles.Fault) -> bool:
        if isinstance(answer, bundles.Fault):
            one.fail(answer.reason, answer.detail)
            return False
        one.answers.append(list(answer.messages))
        if answer.done or one.reason == "length":
            return False
        if len(one.replies) >= self.limits.turns:
            one.reason = "turns"
            return False
        assert one.problem is not None
        sample, reply = one.samples[-1], one.replies[-1]
        try:
            found = self.renderer.follow(one.problem, sample.ids, one.messages, reply, answer.messages)
        except RowError as error:
            one.fail(TEMPLATE, str(error))
            return False
        one.messages += [{"role": "assistant", "content": reply}, *answer.messages]
        # What the environment said counts, also where a template has rewritten what was before it.
        one.used += max(len(found.ids) - len(sample.ids), 0)
        if len(found.ids) >= self.limits.sequence or one.used >= self.limits.completion:
            one.reason = "length"
            return False
        if found.extends:
            sample.add(found.ids[len(sample.ids) :])
        else:
            one.samples.append(TrainedSequence.of(found.ids))
        return True

    def _reward(self, played: Sequence[Played]) -> None:
        """Take the environment's rewards."""
        for one, found in zip(played, self.arena.rewards([one.key for one in played]), strict=True):
            if isinstance(found, bundles.Fault):
                one.fail(found.reason, found.detail)
            elif not found and self.judge is None:
                raise UserError(
                    "The environment gives prompts and no rewards. Fix: reward_model=DIRECTORY, a model of `surogate "
                    "reward`, or an environment that judges."
                )
            else:
                one.rewards = found if self.judge is None else with_room(found)

    def _score(self, played: Sequence[Played], judge: RewardModel) -> None:
        """Add the scores of the reward model."""
        stop_ids = self.renderer.stop_ids
        found = judge.scores([judge.ended(one.samples[-1].ids, stop_ids) for one in played])
        for one, score in zip(played, found, strict=True):
            if math.isfinite(score):
                one.rewards = {**one.rewards, NAME: score}
            else:
                one.rewards = {}
                one.fail(FAULT, f"the score of the reward model is {score}")


def _is_judged(one: Played) -> bool:
    """Whether an episode may have a score: not where it failed, and not where no reward of the environment applies."""
    values = [value for name, value in one.rewards.items() if name != NAME]
    return not one.fault and (not values or any(value is not None for value in values))
