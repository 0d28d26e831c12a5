"""Figures of records under flat names."""

from __future__ import annotations

import math

from surogate_core.events import Rollouts, Spread, event_fields
from surogate_core.files.figures import named_figures
from surogate_testing.monitors import events_of_run


def rollouts(**changes: object) -> dict[str, float]:
    (event,) = (e for e in events_of_run() if isinstance(e, Rollouts))
    return named_figures(event_fields(event) | changes)


def test_rollouts_have_rewards_lengths_shares_and_times() -> None:
    found = rollouts()
    assert math.isnan(found.pop("reward/std"))
    assert found == {
        "reward/mean": 0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/correct": 0.5,
        "reward/correct_std": 0.5,
        "completions/length_mean": 5.0,
        "completions/length_std": 3.0,
        "completions/length_min": 2.0,
        "completions/length_max": 8.0,
        "completions/truncated": 0.25,
        "rollouts/tokens": 20.0,
        "rollouts/without_signal": 0.5,
        "rollouts/kept": 0.5,
        "rollouts/refills": 1.0,
        "rollouts/turns": 1.5,
        "rollouts/prefix_breaks": 0.0,
        "rollouts/faults": 1.0,
        "rollouts/faults_timeout": 1.0,
        "rollouts/tokens_per_second": 100.0,
        "time/generate": 0.2,
        "time/score": 0.01,
    }


def test_what_was_not_measured_has_no_name() -> None:
    found = rollouts(reward=None, rewards={}, seconds={}, faults={})
    assert not [n for n in found if n.startswith(("reward/", "time/", "rollouts/tokens_per"))]
    assert found["rollouts/faults"] == 0
    ended = rollouts(terminated_length=Spread(3.0, 0.0, 3.0, 3.0)._asdict())
    assert ended["completions/terminated_length_mean"] == 3.0


def test_a_reward_named_like_a_figure_of_the_sum_does_not_hide_it() -> None:
    spread = {"mean": 7.0, "std": 0.0, "min": 7.0, "max": 7.0}
    found = rollouts(rewards={"mean": spread, "<lambda> 1": spread})
    assert found["reward/mean"] == 0.5
    assert found["reward/_lambda_1"] == 7.0


def test_figures_of_the_objective_and_of_held_out_tasks() -> None:
    by_kind = {event.name: named_figures(event_fields(event)) for event in events_of_run()}
    assert by_kind["eval_end"] == {"eval/rewards/margins": 0.2}
    assert by_kind["rollout_eval"]["eval/completions/length_mean"] == 5.0
    assert by_kind["rollout_eval"]["eval/rollouts/faults_timeout"] == 4.0
    assert "eval/reward/mean" not in by_kind["rollout_eval"]
    step = next(event for event in events_of_run() if event.name == "step_end")
    assert named_figures(event_fields(step)) == {"train/rewards/margins": 0.1}
    assert by_kind["run_end"] == {}
