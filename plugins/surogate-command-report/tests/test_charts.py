"""The charts that runs have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from surogate_command_report import html, markdown
from surogate_command_report.card import card_of
from surogate_command_report.charts import Chart, charts_of
from surogate_command_report.compare import table
from surogate_command_report.contents import completions

from surogate_core.plugin import events
from surogate_core.service.files import COMPLETIONS, RunRecord
from surogate_testing.monitors import events_of_run


def run_of(*records: dict[str, Any], name: str = "run") -> RunRecord:
    run = RunRecord(directory=Path(name), name=name)
    for record in records:
        run.add(record)
    return run


def step(at: int, **figures: float) -> dict[str, Any]:
    return {"event": "step_end", "step": at, "loss": 0.5, "seconds": 2.0, "figures": figures}


def rollouts(at: int, reward: float, **changes: Any) -> dict[str, Any]:
    spread = {"mean": reward, "std": 0.1, "min": 0.0, "max": 1.0}
    return {
        "event": "rollouts",
        "step": at,
        "reward": spread,
        "rewards": {"a": spread, "b": spread},
        "tokens": 100,
        "without_signal": 0.5,
        "kept": 0.5,
        "refills": 0,
        "turns": 1.0,
        "prefix_breaks": 0,
        "truncated": 0.25,
        "length": {"mean": 10.0, "std": 1.0, "min": 1.0, "max": 20.0},
        "seconds": {"generate": 1.0, "score": 0.5},
        **changes,
    }


def evaluated(at: int, reward: float) -> dict[str, Any]:
    return {"event": "rollout_eval", "step": at, "tasks": 4, "reward": {"mean": reward, "std": 0.1}}


def shape(charts: list[Chart]) -> dict[str, list[str]]:
    return {chart.title: [line.series for line in chart.lines] for chart in charts}


def test_a_run_without_named_figures_has_the_fixed_charts() -> None:
    run = run_of(step(1), {"event": "eval_end", "step": 1, "loss": 0.4})
    assert shape(charts_of([run])) == {"Loss": ["loss", "eval"]}
    assert shape(charts_of([run, run])) == {"Loss": ["loss"], "Eval loss": ["eval"]}
    assert charts_of([run_of()]) == []
    only = charts_of([run_of({"event": "eval_end", "step": 0, "loss": 0.4})])
    assert shape(only) == {"Eval loss": ["eval"]}
    assert only[0].lines[0].style == 1


def test_every_event_of_a_run_is_taken() -> None:
    run = run_of(*(events.event_fields(event) for event in events_of_run()))
    found = shape(charts_of([run]))
    assert found["Reward margin"] == ["train/rewards/margins", "eval/rewards/margins"]
    assert found["Faults: timeout"] == ["rollouts/faults_timeout"]
    assert [row[1:] for row in completions(run)] == [
        ("1", "2 + 2", " 4", "stop", "2", "correct 1, format none"),
        ("none", "2 + 2", " [ …", "timeout", "8", ""),
    ]
    assert "Completions" in html.render([run])


def test_charts_of_reinforcement_learning() -> None:
    run = run_of(rollouts(1, 0.25), step(1, entropy=2.0), evaluated(1, 0.5))
    found = shape(charts_of([run]))
    assert list(found)[:2] == ["Reward", "Rewards by name"]
    assert found["Reward"] == ["reward/mean", "eval/reward/mean"]
    assert found["Rewards by name"] == ["reward/a", "reward/b"]
    assert found["Completion length"] == ["completions/length_mean", "completions/length_max"]
    assert found["Time by phase"] == ["time/generate", "time/score", "time/train"]
    assert not {"Faults", "Refills"} & set(found), "a figure that is always 0 has no chart"
    assert run.curve("time/train")[1].tolist() == [0.5]
    refilled = run_of(rollouts(1, 0.25, refills=2, faults={"exit": 1}), step(1))
    assert {"Faults: exit", "Refills"} <= set(shape(charts_of([refilled])))
    several = shape(charts_of([run, refilled]))
    assert several["Reward"] == ["reward/mean"]
    assert several["Held-out reward"] == ["eval/reward/mean"]
    assert several["Rewards by name: b"] == ["reward/b"]


def test_many_rewards_are_divided_among_charts() -> None:
    names = {f"r{n}": {"mean": 1.0, "std": 0.0} for n in range(11)}
    charts = [c for c in charts_of([run_of(rollouts(1, 0.5, rewards=names))]) if c.title == "Rewards by name"]
    assert [len(chart.lines) for chart in charts] == [8, 3]


def test_a_step_without_a_fault_has_none_of_it() -> None:
    run = run_of(*(rollouts(at, 0.5, faults={"exit": 2} if at == 2 else {}) for at in (1, 2, 3)))
    assert run.curve("rollouts/faults_exit")[1].tolist() == [0.0, 2.0, 0.0]


def test_figures_of_objectives_are_grouped_by_scale() -> None:
    figures = {f"rewards/{name}": 0.5 for name in ("chosen", "rejected", "margins", "accuracies")}
    others = {"own_figure": 1.0, "clip_ratio/low": 0.0, "clip_ratio/high": 0.0, "importance/truncated": 0.1}
    run = run_of(step(1, kl=0.1, pairs=4.0, **figures, **others, **{"importance/mean": 1.0, "logprob_gap/mean": 0.1}))
    found = shape(charts_of([run]))
    assert found["Rewards of the objective"] == ["train/rewards/chosen", "train/rewards/rejected"]
    assert found["Reward margin"] == ["train/rewards/margins"]
    assert found["Clipped tokens"] == ["train/clip_ratio/low", "train/clip_ratio/high"]
    assert found["Own figure"] == ["train/own_figure"]
    assert found["KL divergence"] == ["train/kl"]
    assert found["Importance weights"] == ["train/importance/mean"]
    assert found["Truncated importance weights"] == ["train/importance/truncated"]
    assert found["Log-probability gap"] == ["train/logprob_gap/mean"]
    assert "Pairs" not in found


def test_a_resumed_run_has_each_step_once() -> None:
    run = run_of(*(record for at in (1, 2, 3, 2) for record in (rollouts(at, at / 10), step(at, entropy=float(at)))))
    assert [column.tolist() for column in run.curve("train/entropy")] == [[1, 2], [1.0, 2.0]]
    assert run.curve("reward/mean")[0].tolist() == [1, 2]
    run.drop_after(1)
    assert [len(run.curve(name)[0]) for name in ("reward/mean", "time/train", "nothing/here")] == [1, 1, 0]


def test_a_figure_that_comes_later_is_missing_before() -> None:
    run = run_of(step(1, entropy=1.0), step(2, entropy=1.0, kl=0.5))
    steps, values = run.curve("train/kl")
    assert steps.tolist() == [1, 2]
    assert math.isnan(values[0])
    assert values[1] == 0.5


def test_tiles_verdict_and_tables_of_rewards() -> None:
    records = [
        record for at in range(1, 5) for record in (rollouts(at, at / 4, faults={"exit": 1}), step(at, entropy=1.0))
    ]
    run = run_of({"event": "run_start", "steps": 4}, *records)
    run.end = {"event": "run_end", "reason": "finished", "step": 4}
    card = card_of([run])
    assert card.verdict == "Finished after 4 steps. Reward rose from 0.3750 to 0.8750 (means of 2 steps)"
    tiles = {name: (value, remark) for name, value, remark in card.tiles}
    assert not {"train loss", "reward margin"} & set(tiles)
    assert tiles["reward"][0] == "0.25 → 0.625"
    assert tiles["truncated"] == ("25.0% → 25.0%", "of completions")
    assert tiles["faults"][0] == "4"
    assert tiles["longest phase"] == ("generate 50%", "score 25%, train 25%")
    for at, reward in ((2, 0.5), (3, 0.75), (4, 0.25)):
        run.add(evaluated(at, reward))
    card = card_of([run])
    assert card.verdict == "Finished after 4 steps. Held-out reward fell from 0.5000 to 0.2500"
    assert card.tiles[0] == ("held-out reward", "0.500 → 0.250", "highest 0.750, step 3")
    header, rows = table([run, run_of(step(1), name="other")])
    assert dict(zip(header, rows[0], strict=True))["held-out reward"] == "0.5000 → 0.2500"
    better = run_of(step(1), evaluated(1, 0.8), evaluated(2, 0.7), name="better")
    assert [row[0] for row in table([run, better])[1]] == ["run", "better (highest)"]
    assert card_of([run, better]).verdict.endswith(". Highest held-out reward: 0.8000, better, step 1")
    text = markdown.render([run])
    assert "| step | train loss | learning rate | grad norm | tokens/s | reward | length | entropy |" in text
    assert "| 4 | 0.5 | nan | nan | nan | 1 | 10 | 1 |" in text
    assert "entropy" not in markdown.render([run_of(step(1))])


def test_completions_of_a_long_run_are_thinned_and_those_of_a_resumed_one_replaced() -> None:
    def sample(at: int, reward: float = 1.0) -> dict[str, Any]:
        one = {"prompt": "p", "completion": f"c{at}", "reward": reward, "reason": "stop", "length": 1}
        return {"event": "rollout_samples", "step": at, "samples": [one] * 6}

    run = run_of(*(sample(at) for at in range(1, 500)))
    assert len(run.completions) <= COMPLETIONS + 1
    steps = [int(one["step"]) for one in run.completions]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 499)
    shown = completions(run)
    assert [row[0] for row in shown[:5]] == ["499"] * 4 + [shown[4][0]]
    assert len(shown) == 20
    run.add(sample(3, reward=0.5))
    assert [int(one["step"]) for one in run.completions][-1] == 3
