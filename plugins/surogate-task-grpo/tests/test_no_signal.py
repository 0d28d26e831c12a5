import pytest
from surogate_task_grpo.no_signal import cause, message
from surogate_task_grpo.options import GRPOOptions
from surogate_task_grpo.play import Played


def group(*rewards, reason="stop", fault=False, detail=""):
    return [
        Played(key=(0, i), problem=None, reward=reward, reason=reason, fault=fault and reward is None, detail=detail)
        for i, reward in enumerate(rewards)
    ]


def options(**more):
    return GRPOOptions(num_generations=4, **more)


MASK = options(truncated_completions="mask")


@pytest.mark.parametrize(("reason", "key"), [("length", "max_completion_length"), ("turns", "max_turns")])
def test_completions_that_are_truncated_and_masked_are_named_with_the_limit(reason, key):
    one = group(0.0, 1.0, 2.0, 3.0, reason=reason)
    assert cause(MASK, one) == "masked"
    assert cause(options(), one) is None
    said = message(MASK, [one, one])
    assert f"rewards differ, but every completion that has one is truncated ({reason} 8)" in said
    assert f"Fix: a larger {key}, or truncated_completions=keep" in said
    assert "equal" not in said


def test_both_limits_are_named():
    said = message(MASK, [group(0.0, 1.0, reason="length"), group(0.0, 1.0, reason="turns")])
    assert "(length 2, turns 2)" in said
    assert "a larger max_completion_length and a larger max_turns" in said


def test_one_reward_a_group():
    one = group(None, 1.0, None, None)
    assert cause(options(), one) == "alone"
    said = message(options(), [one])
    assert "one completion has a reward and nothing to compare it with (the environment gives 3 of 4" in said
    assert "Fix: see what the environment does with `surogate env check`." in said
    faults = group(None, 1.0, None, None, reason="timeout", fault=True, detail="slow.")
    said = message(options(), [faults])
    assert "(timeout 3, the first: slow)" in said
    assert "environment_timeout" in said


def test_equal_rewards_and_whether_truncation_may_be_the_reason():
    assert "in 1 groups of 4 completions, every reward is 1. Fix: train on" in message(options(), [group(1.0, 1.0)])
    cut = message(options(), [group(0.0, 0.0, 0.0, reason="length")])
    assert "every reward is 0, and most completions are truncated (length 3). Fix: a larger max_compl" in cut
    assert "otherwise train on examples" in cut
    two = [group(1.0, 1.0), group(0.0, 0.0)]
    assert "the rewards within each group are equal" in message(options(), two)


def test_several_causes_have_their_groups():
    said = message(MASK, [group(0.0, 1.0, reason="length")] * 2 + [group(1.0, 1.0), group(None, None)])
    assert "in 2 of them rewards differ, but" in said
    assert "in 1 of them the rewards within each group are equal" in said or "in 1 of them every reward is 1" in said
    assert "in 1 of them no completion has a reward" in said


def test_no_reward_at_all_counts_faults_and_none():
    said = message(options(), [group(None, None), group(None, None, reason="exit", fault=True)])
    assert said.startswith("None of 2 groups of 4 completions has a reward: exit 2, None 2. Fix: ")
