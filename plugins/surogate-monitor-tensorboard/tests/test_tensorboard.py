"""What TensorBoard's own reader finds in the files."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import surogate_monitor_tensorboard

from surogate_core.plugin import events
from surogate_testing.monitors import events_of_run
from surogate_testing.run_events import START, step


def monitor(directory: Path) -> Any:
    pytest.importorskip("tensorboard")
    spec = surogate_monitor_tensorboard.surogate_monitor()
    config = {"learning_rate": 1e-3, "name": "<script>"}
    info = events.RunInfo(run_name="r", output_dir=str(directory), task="sft", config=config, interactive=False)
    return spec.build(spec.options(), info)


def read(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"))
    reader.Reload()
    return reader


def scalars(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(s.step, s.value) for s in read(directory).Scalars(tag)]


def test_scalars_and_texts_read_back(tmp_path: Path) -> None:
    writer = monitor(tmp_path)
    advice = events.Advice(step=2, rule="plateau", message="It stands.", key="k", suggestion="turn")
    phase = events.PhaseChange(step=2, phase="plateau", previous="warmup", improvement=0.0)
    evaluation = events.EvalEnd(step=2, loss=1.25, label_tokens=1, seconds=0.1, gap=None)
    samples = events.Samples(step=2, prompts=("Why?",), texts=("So.\nYes.",))
    for event in (
        events.Progress(task="t", done=0),
        START,
        step(1, 3.0),
        step(2, 2.5),
        evaluation,
        phase,
        advice,
        samples,
    ):
        assert writer.on_event(event) is None
    writer.close()
    assert scalars(tmp_path, "train/loss") == [(1, 3.0), (2, 2.5)]
    assert scalars(tmp_path, "eval/loss") == [(2, 1.25)]
    assert scalars(tmp_path, "train/peak_memory_bytes") == [(1, 2.0**30), (2, 2.0**30)]
    assert scalars(tmp_path, "train/lr")[0] == (1, pytest.approx(1e-3))
    assert set(read(tmp_path).Tags()["tensors"]) == {
        "config/text_summary",
        "phase/text_summary",
        "advice/plateau/text_summary",
        "samples/1/text_summary",
    }
    (text,) = read(tmp_path).Tensors("samples/1/text_summary")
    assert text.tensor_proto.string_val == ["    Why?\n    → So.\n    Yes.\n".encode()]
    (text,) = read(tmp_path).Tensors("advice/plateau/text_summary")
    assert text.tensor_proto.string_val == [b"It stands. k: turn."]
    assert (writer.state(), writer.load_state({})) == ({}, None)


def test_a_resumed_run_hides_the_steps_of_a_killed_one(tmp_path: Path) -> None:
    killed = monitor(tmp_path)
    for event in (START, step(1, 1.0), step(2, 2.0), step(3, 3.0)):
        killed.on_event(event)
    killed.close()
    resumed = monitor(tmp_path)
    resumed.on_event(replace(START, start_step=1))
    resumed.on_event(step(2, 20.0))
    resumed.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 20.0)]


def test_nothing_is_written_by_a_run_that_never_starts(tmp_path: Path) -> None:
    writer = monitor(tmp_path)
    writer.on_event(step(1, 1.0))
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_the_option_has_the_defaults() -> None:
    from omegaconf import OmegaConf

    spec = surogate_monitor_tensorboard.surogate_monitor()
    yaml = resources.files("surogate_monitor_tensorboard.conf.monitor").joinpath("tensorboard.yaml").read_text()
    values = dict(OmegaConf.create(yaml))
    assert values.pop("name") == spec.name == "tensorboard"
    assert spec.options(**values) == spec.options()


def test_rewards_and_completions_of_reinforcement_learning(tmp_path: Path) -> None:
    writer = monitor(tmp_path)
    for event in (
        START,
        *(e for e in events_of_run() if isinstance(e, events.Rollouts | events.RolloutSamples | events.RolloutEval)),
    ):
        writer.on_event(event)
    writer.close()
    assert scalars(tmp_path, "reward/mean") == [(3, 0.5)]
    assert scalars(tmp_path, "reward/correct") == [(3, 0.5)]
    assert scalars(tmp_path, "time/generate") == [(3, pytest.approx(0.2))]
    assert scalars(tmp_path, "eval/completions/length_mean") == [(3, 5.0)]
    (text,) = read(tmp_path).Tensors("samples/1/text_summary")
    assert text.tensor_proto.string_val == ["    [reward 1, stop, 2 tokens] 2 + 2\n    →  4\n".encode()]
