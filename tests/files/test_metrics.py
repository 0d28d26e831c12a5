"""metrics.jsonl: strict, flushed, and one history over kills and resumes."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from surogate_core.events import CheckpointSaved, EvalEnd, Notice, Progress, RunEnd, RunStart, StepEnd
from surogate_core.files.metrics import METRICS, MetricsWriter, read_metrics

START = RunStart(
    model="qwen3 tiny",
    parameters=1000,
    trainable_parameters=10,
    train_tokens=500,
    steps=9,
    start_step=0,
    tokens_per_step=64,
    epochs=1.0,
    device="cpu",
    notes=("a", "b"),
)
END = RunEnd(
    reason="finished", step=9, seconds=1.0, first_eval_loss=5.0, last_eval_loss=None, export_path="output/adapter"
)


def step(number: int, loss: float = 1.0) -> StepEnd:
    return StepEnd(
        step=number,
        epoch=0.1,
        loss=loss,
        grad_norm=math.inf,
        lr=1e-4,
        tokens=60,
        label_tokens=30,
        total_tokens=60 * number,
        seconds=0.1,
        tokens_per_second=600.0,
        eta_seconds=1.0,
        peak_memory_bytes=10**9,
    )


def writer_in(directory: Path, *, progress: bool = False) -> MetricsWriter:
    return MetricsWriter(directory / METRICS, progress=progress)


def lines(directory: Path) -> list[dict]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not strict JSON")

    text = (directory / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_event_is_a_line_at_once_but_steps(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    events = [
        Notice(level="info", message="NaN", data={"x": float("nan"), "path": Path("p")}),
        START,
        step(1, float("nan")),
        EvalEnd(step=1, loss=2.0, label_tokens=5, seconds=0.1, gap=None),
        CheckpointSaved(step=1, path="output/checkpoint-1", seconds=0.1, reason="schedule"),
        END,
    ]
    for count, event in enumerate(events):
        writer.add(event)
        if count:
            assert len(lines(tmp_path)) == (count if isinstance(event, StepEnd) else count + 1)
    names = [record["event"] for record in lines(tmp_path)]
    assert names == ["notice", "run_start", "step_end", "eval_end", "checkpoint_saved", "run_end"]
    assert lines(tmp_path)[2]["loss"] == "NaN"
    assert lines(tmp_path)[2]["grad_norm"] == "Infinity"
    assert all(isinstance(record["time"], float) for record in lines(tmp_path))
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(read[2]["loss"])
    assert read[2]["grad_norm"] == math.inf
    assert read[0]["message"] == "NaN"
    assert math.isnan(read[0]["data"]["x"])
    assert read[1]["notes"] == ["a", "b"]
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl", event="step_end")] == [1]
    writer.close()


def test_steps_are_written_soon_and_before_a_checkpoint_is(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.add(START)
    writer.add(step(1))
    deadline = time.monotonic() + 30
    while len(lines(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [record.get("step") for record in lines(tmp_path)] == [None, 1]
    told = time.time()
    writer.add(step(2))
    writer.add(step(3))
    writer.flush()
    assert [record.get("step") for record in lines(tmp_path)] == [None, 1, 2, 3]
    assert all(told - 0.001 <= record["time"] <= time.time() + 0.001 for record in lines(tmp_path)[2:])
    writer.close()


def test_a_write_that_fails_is_told_at_the_next_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(event: object, *, at: float) -> str:
        raise OSError("No space left on device")

    writer = writer_in(tmp_path)
    writer.add(START)
    monkeypatch.setattr("surogate_core.files.metrics.json_line", full)
    writer.add(step(1))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "metrics"]
    thread.join(30)
    with pytest.raises(OSError, match="No space"):
        writer.add(step(2))
    writer.close()
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_progress_only_when_asked(tmp_path: Path, asked: bool) -> None:
    writer = writer_in(tmp_path, progress=asked)
    writer.add(START)
    writer.add(Progress(task="loading", done=1, total=2))
    writer.close()
    assert ("progress" in [record["event"] for record in lines(tmp_path)]) == asked


def test_resume_supersedes_what_a_killed_run_left(tmp_path: Path) -> None:
    killed = writer_in(tmp_path)
    killed.add(START)
    for number in range(1, 8):
        killed.add(step(number, loss=1.0))
    killed.add(EvalEnd(step=6, loss=2.0, label_tokens=5, seconds=0.1, gap=0.1))
    killed.add(Notice(level="warning", message="kept"))
    # SIGKILL in the middle of a line.
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"event": "step_end", "st')

    resumed = writer_in(tmp_path)
    resumed.add(Notice(level="info", message="resuming"))
    resumed.add(replace(START, start_step=5))
    for number in range(6, 10):
        resumed.add(step(number, loss=3.0))
    resumed.add(END)
    resumed.close()
    records = lines(tmp_path)
    assert [r["step"] for r in records if r["event"] == "step_end"] == list(range(1, 10))
    assert [r["loss"] for r in records if r["event"] == "step_end"] == [1.0] * 5 + [3.0] * 4
    assert [r for r in records if r["event"] == "eval_end"] == []
    assert [r["message"] for r in records if r["event"] == "notice"] == ["kept", "resuming"]
    assert [r["start_step"] for r in records if r["event"] == "run_start"] == [0, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_new_run_sets_the_old_file_aside(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        writer = writer_in(tmp_path)
        writer.add(START)
        writer.add(step(1, loss))
        writer.close()
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl", event="step_end")] == [2.0]
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl.1", event="step_end")] == [1.0]
    writer = writer_in(tmp_path)
    writer.add(START)
    writer.close()
    assert [r["loss"] for r in read_metrics(tmp_path / "metrics.jsonl.2", event="step_end")] == [2.0]


@pytest.mark.parametrize("ended", [False, True])
def test_failing_before_the_start_leaves_an_earlier_run_as_it_is(tmp_path: Path, ended: bool) -> None:
    path = tmp_path / "metrics.jsonl"
    text = '{"event": "step_end", "step": 1, "loss": 1.0}\n{"event": "run_end", "reason": "finished"}\n{"torn'
    path.write_text(text)
    writer = writer_in(tmp_path)
    writer.add(Notice(level="error", message="no such data set"))
    if ended:
        writer.add(replace(END, reason="failed"))
    writer.close()
    assert path.read_text() == text


def test_failing_before_the_start_is_recorded_where_no_run_was(tmp_path: Path) -> None:
    for message in ("no such data set", "no such model"):
        writer = writer_in(tmp_path)
        writer.add(Notice(level="error", message=message))
        writer.add(replace(END, reason="failed"))
        # Before `close`: the report is made from the file.
        assert [r["event"] for r in lines(tmp_path)] == ["notice", "run_end"]
        assert lines(tmp_path)[0]["message"] == message
        writer.close()
    writer = writer_in(tmp_path)
    writer.add(START)
    writer.close()
    assert [r["event"] for r in lines(tmp_path)] == ["run_start"]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_pipe_in_its_place_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    writer = writer_in(tmp_path)
    writer.add(START)
    writer.close()
    assert (tmp_path / "metrics.jsonl").is_file()
    assert [r["event"] for r in lines(tmp_path)] == ["run_start"]


def test_reader_gives_one_record_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"event": "step_end", "step": {s}, "loss": {v}}}\n' for s, v in [(1, 1), (2, 2), (1, 3)])
    )
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(2, 2), (1, 3)]
