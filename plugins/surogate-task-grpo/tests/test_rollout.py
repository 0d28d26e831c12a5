import json
import re

import numpy as np
import pytest
from surogate_task_grpo.options import GRPOOptions
from surogate_task_grpo.play import Played, TrainedSequence
from surogate_task_grpo.record import CompletionLog
from surogate_task_grpo.rollout import Collector, Generation, rollouts_event, samples_event, unused_weights

from surogate_core.plugin import UserError, bundles


def mean(rewards, lengths):
    return rewards - np.nanmean(rewards, 1, keepdims=True)


MEAN = bundles.part_of("advantage", bundles.AdvantageSpec(name="mean", build=lambda options: mean))
TASK = bundles.EnvironmentProblem(messages=({"role": "user", "content": "?"},))


def episode(number, place, reward, *, length=4, reason="stop", detail=""):
    sample = TrainedSequence.of((1, 2))
    sample.add([3] * length, [-1.0] * length)
    rewards = {} if reward is None else {"exact": reward}
    fault = reason not in ("stop", "length")
    return Played(
        key=(number, place),
        problem=TASK,
        samples=[sample],
        replies=["text"],
        answers=[[]],
        reason=reason,
        fault=fault,
        detail=detail,
        rewards=rewards,
        reward=reward,
        length=length,
    )


class Prompts:
    """Groups by a function of the prompt's number."""

    def __init__(self, rewards, **figures):
        self.rewards, self.figures, self.calls = rewards, figures, []
        self.drawn = 0

    def draw(self, count):
        self.calls.append(count)
        self.drawn += count
        return [(number, TASK) for number in range(self.drawn - count, self.drawn)]

    def play(self, tasks):
        return [
            episode(number, place, reward, **self.figures)
            for number, _ in tasks
            for place, reward in enumerate(self.rewards(number))
        ]


def collect(rewards, *, figures=(), **options):
    options = {"num_generations": 2, "prompts_per_step": 3, **options}
    prompts = Prompts(rewards, **dict(figures))
    collector = Collector(options=GRPOOptions(**options), advantage=MEAN, draw=prompts.draw, play=prompts.play)
    return collector.collect(), prompts


def test_groups_without_signal_are_replaced():
    found, prompts = collect(lambda number: (0.0, float(number % 2)))
    assert prompts.calls == [3, 2, 1]
    assert [group.number for group in found.kept] == [1, 3, 5]
    assert found.refills == 2
    assert [group.advantages for group in found.kept] == [[-0.5, 0.5]] * 3
    event = rollouts_event(found, 7)
    assert (event.prompts, event.completions, event.kept, event.without_signal) == (6, 12, 0.5, 0.5)
    assert event.reward.mean == 0.25
    assert event.rewards["exact"].max == 1.0


def test_a_step_takes_fewer_groups_when_refills_are_used_up():
    found, prompts = collect(lambda number: (0.0, float(number == 1)), max_refills=2)
    assert prompts.calls == [3, 2, 2]
    assert len(found.kept) == 1


def test_generations_without_any_signal_are_repeated_and_then_an_error():
    found, prompts = collect(lambda number: (0.0, float(number > 7)), max_refills=1)
    assert prompts.calls == [3, 3, 3, 2]
    assert [group.number for group in found.kept] == [8, 9, 10]
    with pytest.raises(UserError, match=r"no signal: in 12 groups of 2 completions, every reward is 0\. Fix: "):
        collect(lambda number: (0.0, 0.0), max_refills=1, max_attempts_without_signal=2)
    with pytest.raises(UserError, match=r"the rewards within each group are equal"):
        collect(lambda number: (number, number))
    with pytest.raises(UserError, match=r"has a reward: exit 90\."):
        collect(lambda number: (None, None), figures={"reason": "exit"})
    with pytest.raises(UserError, match=r"has a reward: exception 90, the first: ValueError: broken\. Fix: "):
        collect(lambda number: (None, None), figures={"reason": "exception", "detail": "ValueError: broken"})
    with pytest.raises(UserError, match=r"None of 45 groups of 2 completions has a reward: .* are all None\. Fix: see"):
        collect(lambda number: (None, None))


@pytest.mark.parametrize(("prompts", "completions"), [(3, 6), (1, 4)])
def test_prompts_are_not_replaced_where_every_episode_takes_too_long(prompts, completions):
    """Each costs the whole time limit, so a step would go on for hours. One prompt alone may be slow."""
    match = rf"timeout {completions}, the first: reply took more than 1 s\. Fix: a larger environment_timeout"
    with pytest.raises(UserError, match=match):
        collect(
            lambda number: (None, None),
            figures={"reason": "timeout", "detail": "reply took more than 1 s"},
            prompts_per_step=prompts,
        )


def test_a_step_without_any_reward_says_what_to_change():
    for figures, words in {
        ("prompt_too_long", "90 tokens, and a row has 64"): "the first: 90 tokens, and a row has 64. Fix: a larger seq",
        ("template", "no system"): "the first: no system. Fix: a `template` that takes the messages",
        ("reward_model", "the score is nan"): "the first: the score is nan. Fix: a reward model whose",
        ("exit", ""): "exit 90. Fix: see what the environment does with `surogate env check`.",
    }.items():
        with pytest.raises(UserError, match=re.escape(words)):
            collect(lambda number: (None, None), figures=dict(zip(("reason", "detail"), figures, strict=True)))


def test_a_completion_without_a_reward_has_no_advantage_and_no_part():
    found, _ = collect(lambda number: (0.0, None, 1.0), num_generations=3)
    event = rollouts_event(found, 1)
    assert event.reward.mean == 0.5
    samples = samples_event(found, 1).samples
    assert [sample.reward for sample in samples] == [1.0] * 3 + [0.0] * 3


def test_a_completion_that_failed_is_shown():
    found, _ = collect(lambda number: (0.0, 1.0, 0.5), num_generations=3)
    found.groups[1].played[2] = episode(1, 2, None, reason="timeout")
    samples = samples_event(found, 1).samples
    assert [sample.reward for sample in samples] == [1.0] * 3 + [0.0] * 3 + [None]
    assert samples[-1].reason == "timeout"


def test_one_reward_is_no_comparison():
    with pytest.raises(UserError, match="no signal"):
        collect(lambda number: (1.0, None), max_refills=0)


def test_truncated_completions():
    figures = {"reason": "length", "length": 512}
    found, _ = collect(lambda number: (0.0, 1.0), figures=figures)
    assert [one.reward for one in found.groups[0].played] == [0.0, 1.0]
    with pytest.raises(UserError, match="no signal"):
        collect(lambda number: (0.0, 1.0), figures=figures, mask_truncated_completions=True)
    found, _ = collect(lambda number: (0.0, 1.0), figures=figures, truncated_completions="penalty")
    assert [one.reward for one in found.groups[0].played] == [-1.0, 0.0]
    found, _ = collect(
        lambda number: (0.0, 1.0),
        figures={"length": 487},
        truncated_completions="penalty",
        overlong_buffer=50,
    )
    assert [one.rewards for one in found.groups[0].played] == [
        {"exact": 0.0, "length_penalty": -0.5},
        {"exact": 1.0, "length_penalty": -0.5},
    ]


def test_the_record_is_cut_back_to_the_checkpoint(tmp_path):
    found, _ = collect(lambda number: (0.0, 1.0))
    whole = CompletionLog(tmp_path)
    for step in (1, 2, 3):
        whole.append(step, found)
        if step == 1:
            after_first = whole.bytes
    whole.sync()
    expected = whole.path.read_bytes()
    lines = [json.loads(line) for line in expected.splitlines()]
    assert len(lines) == 18
    assert lines[0]["samples"] == [{"ids": [1, 2, 3, 3, 3, 3], "sampled": [[2, 6]]}]
    assert lines[1]["rewards"] == {"exact": 1.0}
    # A killed run's last line may be a part of one.
    whole.path.write_bytes(expected + b'{"step": 4, "pro')
    resumed = CompletionLog(tmp_path)
    resumed.sync()  # a run that has not written yet has nothing to wait for
    resumed.bytes = after_first
    resumed.append(2, found)
    resumed.append(3, found)
    assert whole.path.read_bytes() == expected
    anew = CompletionLog(tmp_path)
    anew.append(1, found)
    assert whole.path.stat().st_size == after_first


def test_a_weight_of_a_reward_that_no_completion_has_is_told():
    found, _ = collect(lambda number: (0.0, 1.0))
    said = unused_weights(GRPOOptions(reward_weights={"exakt": 2.0, "exact": 1.0}), found)
    assert said == "reward_weights: no completion of the first step has a reward exakt; there are exact."
    assert unused_weights(GRPOOptions(reward_weights={"exact": 1.0}), found) is None
    none = Generation(groups=[], refills=0)
    assert unused_weights(GRPOOptions(reward_weights={"exakt": 2.0}), none) is None, "nothing is known yet"
