"""Advantages equal those that their papers' formulas give by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from surogate_task_grpo import surogate_advantage
from surogate_task_grpo.advantages import ADVANTAGES

from surogate_core.plugin import PluginError, advantages, bundles
from surogate_testing.suites import bundle_checks

NAN = float("nan")
REWARDS = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 1.0, 3.0, 2.0]])
LENGTHS = np.array([[10, 20, 30, 40], [1, 1, 1, 2]])
SPECS = {spec.name: spec for spec in ADVANTAGES}
PARTS = {name: bundles.part_of("advantage", spec) for name, spec in SPECS.items()}
BY_HAND = {
    # Deviations with n - 1: sqrt(0.75 / 3) = 0.5, sqrt(2 / 3), and of all eight sqrt(8.875 / 7).
    "group": [[0.75 / 0.5001, *[-0.25 / 0.5001] * 3], np.array([0.0, -1.0, 1.0, 0.0]) / (np.sqrt(2 / 3) + 1e-4)],
    "batch": np.array([[0.75, -0.25, -0.25, -0.25], [0.0, -1.0, 1.0, 0.0]]) / (np.sqrt(8.875 / 7) + 1e-4),
    "mean": [[0.75, -0.25, -0.25, -0.25], [0.0, -1.0, 1.0, 0.0]],
    # 1 - mean(0, 0, 0); 0 - mean(1, 0, 0); 2 - mean(1, 3, 2); 1 - mean(2, 3, 2); 3 - mean(2, 1, 2).
    "rloo": [[1.0, -1 / 3, -1 / 3, -1 / 3], [0.0, -4 / 3, 4 / 3, 0.0]],
    "maxrl": [[3.0, -1.0, -1.0, -1.0], [0.0, -0.5, 0.5, 0.0]],
    # Baselines 10 / 100 and (2 + 1 + 3 + 4) / 5.
    "opo": [[0.9, -0.1, -0.1, -0.1], [0.0, -1.0, 1.0, 0.0]],
}


def odd(compute: Any) -> bundles.Part:
    return bundles.part_of(
        "advantage", bundles.AdvantageSpec(name="odd", build=lambda options: compute), plugin="plugin x"
    )


def test_every_one_is_computed_by_hand_here() -> None:
    assert set(SPECS) == set(BY_HAND)


@pytest.mark.parametrize("name", BY_HAND)
def test_values(name: str) -> None:
    np.testing.assert_allclose(advantages(PARTS[name], REWARDS, LENGTHS), BY_HAND[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", BY_HAND)
def test_equal_rewards_give_no_signal(name: str) -> None:
    rewards = np.array([[1.0] * 4, [0.0] * 4, [0.1] * 4])
    np.testing.assert_allclose(advantages(PARTS[name], rewards, np.ones((3, 4), np.int64)), 0.0, atol=1e-12)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_missing_reward_is_as_a_smaller_group(name: str) -> None:
    rewards = np.array([[1.0, NAN, 0.0, 0.25, NAN]])
    lengths = np.array([[3, 1000, 4, 5, 7]])
    found = advantages(PARTS[name], rewards, lengths)
    there = [0, 2, 3]
    np.testing.assert_array_equal(found[:, [1, 4]], 0.0)
    np.testing.assert_allclose(found[:, there], advantages(PARTS[name], rewards[:, there], lengths[:, there]))


@pytest.mark.parametrize("rewards", [[NAN, NAN], [NAN, 0.5]])
@pytest.mark.parametrize("name", BY_HAND)
def test_a_group_with_less_than_two_rewards_has_no_signal(name: str, rewards: list[float]) -> None:
    np.testing.assert_array_equal(advantages(PARTS[name], np.array([rewards]), np.array([[3, 4]])), 0.0)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_checks_for_plugins_hold(name: str) -> None:
    for check in bundle_checks("advantage", SPECS[name]):
        check.run()


def test_the_plugin_offers_them() -> None:
    assert [spec.name for spec in surogate_advantage()] == list(BY_HAND)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda r, n: r[:, :1], r"returned the shape \(2, 1\), not that of the rewards, \(2, 4\)"),
        (lambda r, n: r / (r - 1.0), "returned inf for prompt 0, completion 0, whose reward is 1.0"),
        (lambda r, n: {}["std"], "failed: KeyError: 'std'"),
    ],
)
def test_a_wrong_one_is_named(compute: object, message: str) -> None:
    with np.errstate(divide="ignore"), pytest.raises(PluginError, match=f"^advantage odd of plugin x {message}"):
        advantages(odd(compute), REWARDS, LENGTHS)


def test_the_function_may_write_into_its_arguments() -> None:
    def compute(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rewards -= rewards.mean(1, keepdims=True)
        lengths[:] = 0
        return rewards

    rewards, lengths = REWARDS.copy(), LENGTHS.copy()
    advantages(odd(compute), rewards, lengths)
    assert (rewards == REWARDS).all()
    assert (lengths == LENGTHS).all()
