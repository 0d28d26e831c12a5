"""Names and values of the scalars, and the calls of a tracker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surogate_core.errors import MachineError
from surogate_core.events import (
    EvalEnd,
    GpuStats,
    Notice,
    PrecisionStats,
    RankStats,
    Rollouts,
    RolloutSamples,
    RoutingStats,
    RunInfo,
    RunStart,
    StepEnd,
)
from surogate_core.train.trackers import (
    SAMPLE_COLUMNS,
    Ended,
    Tracker,
    package,
    plain,
    sample_rows,
    samples_of,
    scalars_of,
)
from surogate_testing.monitors import events_of_run
from surogate_testing.run_events import END, EVENTS, START, step


def test_every_event_of_a_run() -> None:
    found = [(type(event), *scalars_of(event)) for event in events_of_run()]
    silent = [kind for kind, _, named in found if not named]
    assert not {StepEnd, EvalEnd, GpuStats, PrecisionStats, Rollouts, RoutingStats} & set(silent)
    step = next(named for kind, at, named in found if kind is StepEnd and at == 2)
    assert step["train/loss"] == 1.5
    assert step["train/speed_of_light"] == 0.4
    assert step["train/rewards/margins"] == 0.2
    assert len(step) == 9
    bad = next(named for kind, at, named in found if kind is StepEnd and at == 3)
    assert math.isnan(bad["train/loss"])
    assert bad["train/grad_norm"] == math.inf
    evaluations = [named for kind, _, named in found if kind is EvalEnd]
    assert evaluations == [{"eval/loss": 4.0}, {"eval/loss": 2.0, "eval/gap": 0.5, "eval/rewards/margins": 0.2}]
    (gpu,) = [named for kind, _, named in found if kind is GpuStats]
    assert gpu["gpu/power_watts"] == 400.0
    (ranks,) = [named for kind, _, named in found if kind is RankStats]
    assert ranks == {"ranks/peak_memory_bytes_max": 2.0**31, "ranks/slowest_excess": pytest.approx(1 / 3)}
    assert scalars_of(RankStats(step=1, peak_memory_bytes=(1, 2))) == (1, {"ranks/peak_memory_bytes_max": 2.0})
    (precision,) = [named for kind, _, named in found if kind is PrecisionStats]
    assert precision == {
        "precision/saturated_activation": 0.1,
        "precision/saturated_gradient": 0.0,
        "precision/underflowed_activation": 0.0,
    }


def test_completions_have_their_rewards_with_them() -> None:
    (event,) = (e for e in events_of_run() if isinstance(e, RolloutSamples))
    assert list(samples_of(event).values()) == [
        "[reward 1, stop, 2 tokens] 2 + 2\n→  4",
        "[no reward, timeout, 8 tokens] 2 + 2\n→  [",
    ]
    rows = [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in sample_rows(event)]
    assert [(row["completion"], row["reward"], row["ended by"]) for row in rows] == [
        (" 4", 1.0, "stop"),
        (" [", None, "timeout"),
    ]


class Listing(Tracker):
    """A tracker whose runs are lists."""

    title = "Listing"

    def begin(self, event: RunStart) -> tuple[list[Any], str]:
        self.id = self.id or "first"
        return [self.id], "here"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.append((step, *values))

    def text(self, step: int, name: str, text: str) -> None:
        self.run.append((step, name, text))

    def finish(self, run: list[Any], ended: Ended) -> None:
        run.append(ended)


def listing(**config: Any) -> Listing:
    return Listing(None, RunInfo(run_name="r", output_dir="o", task="sft", config=config, interactive=False))


def test_a_tracker_has_one_run_at_a_time_and_ends_each_once() -> None:
    tracker = listing()
    assert tracker.on_event(step(1, 3.0)) is None, "no run has begun"
    assert tracker.state() == {}
    answer = tracker.on_event(START)
    assert answer is not None
    assert answer.events == (Notice(level="info", message="Listing: here"),)
    first = tracker.run
    assert [tracker.on_event(event) for event in EVENTS if not isinstance(event, RunStart)].count(None) > 1
    texts = [entry for entry in first[1:] if entry[1:2] in (("phase",), ("advice/plateau",), ("samples/1",))]
    assert texts == [
        (2, "phase", "plateau"),
        (2, "advice/plateau", "It stands. k: turn."),
        (2, "samples/1", "Why?\n→ <b>So.\nYes."),
    ]
    assert [entry[0] for entry in first if "train/loss" in entry] == [1, 2]
    tracker.on_event(END)
    tracker.close()
    assert first[-1] == "finished"
    assert "unknown" not in first
    assert tracker.run is None


def test_a_run_whose_end_is_not_reported_is_unknown_and_a_resumed_one_has_its_id() -> None:
    tracker = listing()
    tracker.on_event(START)
    first = tracker.run
    tracker.on_event(START)
    assert first == ["first", "unknown"]
    second = tracker.run
    tracker.close()
    assert second == ["first", "unknown"]
    resumed = listing()
    resumed.load_state({"id": "kept"})
    resumed.on_event(START)
    assert (resumed.run, resumed.state()) == (["kept"], {"id": "kept"})


def test_a_missing_package_is_named_with_what_to_install() -> None:
    with pytest.raises(MachineError, match=r"^monitor mine: its package is not installed\. Fix: pip install 'a\[b\]'$"):
        package("surogate_no_such_tracker", monitor="mine", install="a[b]")
    assert package("math", monitor="mine", install="a[b]") is math


def test_a_configuration_becomes_plain_values() -> None:
    values = {"_a": (1, math.inf), "b": {"c": Path("d")}, "e": None, "f": True}
    assert plain(values) == {"_a": [1, math.inf], "b": {"c": "d"}, "e": None, "f": True}
    stripped = plain(values, key=lambda name: name.lstrip("_"), finite=True)
    assert stripped == {"a": [1, "inf"], "b": {"c": "d"}, "e": None, "f": True}
