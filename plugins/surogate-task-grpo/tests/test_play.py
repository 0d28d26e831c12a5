"""Episodes, with an engine that replies by a script and environments in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from surogate_task_grpo.play import EpisodeLimits, Player

from surogate_core.plugin import UserError, bundles
from surogate_testing.chat_templates import CHATML

END = "<|im_end|>"
MORE = bundles.Turn(messages=({"role": "user", "content": "Go on."},), done=False)


@dataclass
class ScriptedEngine:
    """Replies with what a function says of a request; cut at its largest number of tokens."""

    tokenizer: Any
    reply: Callable[[bundles.Request], str]
    requests: list[bundles.Request] = field(default_factory=list)

    def generate(self, requests: Sequence[bundles.Request], *, on_token: Any = None) -> list[bundles.Completion]:
        found = []
        for index, request in enumerate(requests):
            self.requests.append(request)
            ids = self.tokenizer(self.reply(request), add_special_tokens=False)["input_ids"]
            stop = next((i + 1 for i, token in enumerate(ids) if token in request.stop_ids), None)
            ids = ids[: min(stop or len(ids), request.max_new_tokens)]
            for token in ids:
                on_token(index, token)
            reason = "stop" if ids[-1] in request.stop_ids else "length"
            found.append(
                bundles.Completion(ids=tuple(ids), logprobs=tuple(-0.5 - i for i in range(len(ids))), reason=reason)
            )
        return found

    def forget(self) -> None:
        pass


@dataclass
class LocalArena:
    """Environments without processes: `answer` says what follows the replies of an episode, `judge` its rewards."""

    answer: Callable[[list[str]], bundles.Turn | bundles.Fault] = lambda replies: bundles.Turn(done=True)
    judge: Callable[[bundles.EnvironmentProblem, list[str]], Mapping[str, float | None] | bundles.Fault] = (
        lambda problem, replies: {"r": 1.0}
    )
    size: int | None = None
    held_out: int = 0
    episodes: dict[Any, tuple[bundles.EnvironmentProblem, list[str]]] = field(default_factory=dict)

    def problems(self, numbers: Sequence[int], seed: int) -> list[bundles.EnvironmentProblem | bundles.Fault]:
        return [
            bundles.EnvironmentProblem(
                messages=({"role": "user", "content": f"Say {number % 7}."},), data={"number": number % 7}
            )
            for number in numbers
        ]

    def start(self, items: Sequence[tuple[Any, bundles.EnvironmentProblem]], *, groups: Sequence[Any] = ()) -> None:
        self.episodes |= {key: (problem, []) for key, problem in items}

    def reply(self, items: Sequence[tuple[Any, str]]) -> list[bundles.Turn | bundles.Fault]:
        for key, text in items:
            self.episodes[key][1].append(text)
        return [self.answer(self.episodes[key][1]) for key, _ in items]

    def rewards(self, keys: Sequence[Any]) -> list[Mapping[str, float | None] | bundles.Fault]:
        return [self.judge(*self.episodes.pop(key)) for key in keys]

    def forget(self, keys: Sequence[Any]) -> None:
        for key in keys:
            del self.episodes[key]

    def close(self) -> None:
        pass


def play(renderer, arena, reply, *, completion=60, sequence=200, turns=8, prompts=1, samples=1, judge=None):
    """(the episodes, the engine that played them)."""
    engine = ScriptedEngine(renderer.tokenizer, reply)
    player = Player(
        engine=engine,
        arena=arena,
        renderer=renderer,
        limits=EpisodeLimits(completion=completion, sequence=sequence, turns=turns),
        weights={},
        lap=lambda phase: None,
        judge=judge,
    )
    numbers = range(prompts)
    problems = list(zip(numbers, arena.problems(numbers, 0), strict=True))
    played = player.play(problems, samples, bundles.Sampling(), lambda left: None)
    player.judged(played)
    return played, engine


def test_the_stop_token_is_trained_and_the_prompt_is_not(renderer_of):
    renderer = renderer_of("chatml-short")
    (one,), _ = play(renderer, LocalArena(), lambda request: f"five{END}")
    (sample,) = one.samples
    prompt = len(renderer.prompt(one.problem))
    assert sample.trained == [False] * prompt + [True] * 5
    assert sample.ids[-1] in renderer.stop_ids
    assert sample.logprobs[prompt:] == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert (one.reason, one.reward, one.length, one.replies) == ("stop", 1.0, 5, ["five"])


def test_what_the_environment_says_is_in_the_sample_and_not_trained(renderer_of):
    renderer = renderer_of("chatml-short")
    arena = LocalArena(answer=lambda replies: MORE if len(replies) < 3 else bundles.Turn(done=True))
    (one,), engine = play(renderer, arena, lambda request: f"ok{END}", completion=100)
    (sample,) = one.samples
    sampled = [token for token, trained in zip(sample.ids, sample.trained, strict=True) if trained]
    assert renderer.tokenizer.decode(sampled) == f"ok{END}" * 3
    assert renderer.tokenizer.decode(sample.ids).count("Go on.") == 2
    assert one.length == 9
    assert one.used == len(sample.ids) - len(renderer.prompt(one.problem))
    # Each turn has random numbers of its own.
    assert len({request.sample for request in engine.requests}) == 3


def test_a_template_that_breaks_the_prefix_divides_the_episode(renderer_of):
    stripped = CHATML.replace("m.content + '<|im_end|>", "(m.content | trim) + '<|im_end|>")
    renderer = renderer_of("chatml-short", template=stripped)
    arena = LocalArena(answer=lambda replies: MORE if len(replies) < 2 else bundles.Turn(done=True))
    (one,), _ = play(renderer, arena, lambda request: f" ok{END}")
    first, second = one.samples
    assert sum(first.trained) == sum(second.trained) == 4
    assert first.trained[-4:] == second.trained[-4:] == [True] * 4
    assert one.length == 8
    assert one.used == 8 + (len(second.ids) - 4) - len(first.ids)


def test_room_of_completion_sequence_and_turns(renderer_of):
    renderer = renderer_of("chatml-short")
    endless = LocalArena(answer=lambda replies: MORE)
    (one,), _ = play(renderer, LocalArena(), lambda request: "x" * 100, completion=10)
    assert (one.reason, one.length, one.truncated, one.reward) == ("length", 10, True, 1.0)
    (one,), _ = play(renderer, endless, lambda request: f"ok{END}", turns=2, completion=150)
    assert (one.reason, len(one.replies), one.truncated) == ("turns", 2, True)
    (one,), _ = play(renderer, endless, lambda request: f"ok{END}", completion=20)
    assert (one.reason, one.used <= 20 + 40) == ("length", True)
    prompt = len(renderer.prompt(one.problem))
    (one,), _ = play(renderer, LocalArena(), lambda request: "x" * 100, sequence=prompt + 7)
    assert (one.reason, one.length) == ("length", 7)
    (one,), _ = play(renderer, LocalArena(), lambda request: "x", sequence=prompt)
    assert (one.reason, one.fault, one.reward) == ("prompt_too_long", True, None)
    assert one.detail == f"{prompt} tokens, and a row has {prompt}"


@pytest.mark.parametrize(("turn", "message"), [(0, "Say"), (1, "Go on")])
def test_a_template_that_refuses_the_messages_is_a_fault_with_its_reason(renderer_of, turn, message):
    refusing = "{%- if messages[-1].content.startswith('MARK') %}{{ raise_exception('not that') }}{% endif -%}" + CHATML
    renderer = renderer_of("chatml-short", template=refusing.replace("MARK", message))
    arena = LocalArena(answer=lambda replies: MORE)
    (one,), _ = play(renderer, arena, lambda request: f"ok{END}")
    assert (one.reason, one.fault, one.reward, len(one.replies)) == ("template", True, None, turn)
    assert one.detail == "the chat template refuses the conversation: not that"


@pytest.mark.parametrize("where", ["answer", "judge"])
def test_a_fault_is_a_reason_and_the_others_go_on(renderer_of, where):
    fault = bundles.Fault(reason="timeout")

    def odd(*arguments):
        return fault if arguments[-1][-1] == "bad" else bundles.Turn(done=True) if where == "answer" else {"r": 0.5}

    arena = LocalArena(**{where: odd})
    played, _ = play(
        renderer_of("chatml-short"), arena, lambda r: f"{'bad' if r.sample == 1 else 'good'}{END}", samples=3
    )
    assert [one.reason for one in played] == ["stop", "timeout", "stop"]
    assert [one.fault for one in played] == [False, True, False]
    assert played[1].reward is None


def test_pad_and_several_end_tokens_are_masked_by_position(renderer_of):
    """The pad token ends turns too, and is in the prompt of the second turn; only sampled tokens are trained."""
    renderer = renderer_of("chatml-short", stops=["<|endoftext|>"])
    renderer.tokenizer.pad_token = END
    arena = LocalArena(answer=lambda replies: MORE if len(replies) < 2 else bundles.Turn(done=True))
    (one,), _ = play(renderer, arena, lambda r: f"a{END}" if r.sample == 0 else "b<|endoftext|>")
    (sample,) = one.samples
    sampled = [token for token, trained in zip(sample.ids, sample.trained, strict=True) if trained]
    assert renderer.tokenizer.decode(sampled) == f"a{END}b<|endoftext|>"


class Scores:
    """A reward model that gives the scores of a list in turn."""

    def __init__(self, *scores):
        self.scores_, self.seen = list(scores), []

    def ended(self, ids, stop_ids):
        return list(ids)

    def scores(self, conversations):
        self.seen += conversations
        return self.scores_[: len(conversations)]


def test_a_score_is_one_of_the_rewards_and_no_number_is_a_fault(renderer_of):
    said = {
        0: {"r": 1.0},
        1: {"r": None},
        2: bundles.Fault(reason="timeout"),
        3: {"r": None, "s": 0.0},
        4: {"r": 1.0},
        5: {},
    }
    arena = LocalArena(judge=lambda problem, replies: said[int(replies[0])])
    judge = Scores(0.5, 0.25, float("nan"), float("inf"))
    played, _ = play(renderer_of("chatml-short"), arena, lambda r: f"{r.sample}{END}", samples=6, judge=judge)
    assert [one.reward for one in played] == [1.5, None, None, 0.25, None, None]
    assert [one.reason for one in played] == ["stop", "stop", "timeout", "stop", "reward_model", "reward_model"]
    assert [dict(one.rewards) for one in played[:4]] == [
        {"r": 1.0, "reward_model": 0.5},
        {"r": None, "reward_model": None},
        {},
        {"r": None, "s": 0.0, "reward_model": 0.25},
    ]
    assert [one.detail for one in played[4:]] == [f"the score of the reward model is {name}" for name in ("nan", "inf")]


def test_the_last_conversation_is_scored(renderer_of):
    """Where a template changes earlier turns, that is the one that the last reply was sampled in."""
    stripped = CHATML.replace("m.content + '<|im_end|>", "(m.content | trim) + '<|im_end|>")
    renderer, judge = renderer_of("chatml-short", template=stripped), Scores(1.0)
    arena = LocalArena(answer=lambda replies: MORE if len(replies) < 2 else bundles.Turn(done=True))
    (one,), _ = play(renderer, arena, lambda r: f"  ok{END}", completion=100, judge=judge)
    assert len(one.samples) == 2
    assert judge.seen == [list(one.samples[-1].ids)]


def test_an_environment_without_rewards_needs_a_reward_model(renderer_of):
    arena = LocalArena(judge=lambda problem, replies: {})
    with pytest.raises(UserError, match="gives prompts and no rewards"):
        play(renderer_of("chatml-short"), arena, lambda r: f"a{END}")
