"""Events as strict JSON."""

from __future__ import annotations

import json

from surogate_core.events import EvalEnd, Notice, RolloutSample, RolloutSamples, Spread, event_fields, strict_json
from surogate_testing.monitors import events_of_run


def test_every_event_is_strict_json_under_its_name() -> None:
    for event in events_of_run():
        found = event_fields(event)
        assert found["event"] == event.name
        assert found.keys() - {"event"} == set(event.__dataclass_fields__)
        assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_figures_that_are_not_finite_are_text() -> None:
    event = EvalEnd(step=1, loss=float("nan"), label_tokens=2, seconds=0.5, gap=float("-inf"))
    found = event_fields(event)
    assert (found["loss"], found["gap"], found["seconds"]) == ("NaN", "-Infinity", 0.5)


def test_what_json_does_not_have_is_made_of_what_it_has() -> None:
    notice = Notice(level="info", message="x", data={1: {2.5}, "path": object})
    assert event_fields(notice)["data"] == {"1": [2.5], "path": str(object)}
    assert strict_json((True, None, float("inf"))) == [True, None, "Infinity"]


def test_values_with_names_are_mappings() -> None:
    spread = Spread(0.5, float("nan"), 0.0, 1.0)
    assert strict_json({"correct": spread}) == {"correct": {"mean": 0.5, "std": "NaN", "min": 0.0, "max": 1.0}}
    sample = RolloutSample(prompt="2+2", completion="4 https://u:secret@host/", reward=None, reason="stop", length=1)
    (found,) = event_fields(RolloutSamples(step=1, samples=(sample,)))["samples"]
    assert found["completion"] == "4 https://***@host/"
    assert (found["reward"], found["rewards"], found["length"]) == (None, {}, 1)
