"""benchmarks/grpo.py on a CPU."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpo
import pytest

CASES = ["full", "sft-full", *(["trl-lora"] if find_spec("trl") else [])]


def event(name: str, step: int, time: float, **others: Any) -> dict[str, Any]:
    return {"event": name, "step": step, "time": time, **others}


def recorded(steps: int, *, rollouts: bool) -> list[dict[str, Any]]:
    """The events of a run whose first step takes 100 s and each further one 10 s: generation 6 s, the step 3 s."""
    found = []
    for step in range(1, steps + 1):
        end = 90.0 + 10 * step
        seconds = {"generate": 6.0, "score": 1.0} if rollouts else {}
        if rollouts:
            found.append(event("rollouts", step, end - 3, seconds=seconds, tokens=600, truncated=1.0))
        of_step = {"loss": 1 / step, "tokens": 900, "peak_memory_bytes": 2**30 * step}
        found.append(event("step_end", step, end, seconds=10.0, figures={"logprob_gap/mean": 0.01}, **of_step))
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of runs, which only leave their events; those of adapters fail."""
    lines = []

    def run(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        lines.append(line)
        if "lora=true" in line:
            return subprocess.CompletedProcess(line, 1, stdout="", stderr="surogate: no room\n")
        (output,) = (Path(word.removeprefix("output_dir=")) for word in line if word.startswith("output_dir="))
        output.mkdir()
        events = recorded(grpo.FIRST + 2, rollouts="grpo" in line)
        (output / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
        return subprocess.CompletedProcess(line, 0, stdout="", stderr="")

    monkeypatch.setattr(grpo.subprocess, "run", run)
    return lines


def test_figures_are_those_of_the_steps_that_count(
    tmp_path: Path, runs: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    grpo.main(["--small", "--cases", "full-fp8", "sft-full-fp8", "lora", "--out", str(out)])
    full, sft, lora = json.loads(out.read_text())
    assert full["seconds"] == 10.0
    assert full["steps"] == 2
    assert full["steps_per_hour"] == 360.0
    assert full["phases"] == {"generate": 6.0, "score": 1.0, "train": 3.0}
    assert (full["generated_per_second"], full["trained_per_second"]) == (100.0, 300.0)
    assert (full["memory"], full["gap"], full["truncated"]) == (4.0, 0.01, 1.0)
    assert full["losses"] == sft["losses"] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert sft["phases"] == {"train": 10.0}
    assert sft["trained_per_second"] == 90.0
    assert lora["error"] == "surogate: no room"
    assert "recipe=fp8-hybrid" in runs[0]
    assert "gradient_accumulation_steps=2" in runs[1]
    printed = capsys.readouterr().out
    assert "no room" in printed
    assert "has 333% of the speed of sft-full-fp8" in printed  # 3 s of training, and 10 s


@pytest.mark.parametrize("words", [["--cases", "half"], ["--samples", "12"]])
def test_other_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        grpo.main(words)
    assert {"--cases": "unknown cases: half", "--samples": "not groups of 8"}[words[0]] in capsys.readouterr().err


@pytest.mark.slow
def test_whole_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    grpo.main(["--small", "--cases", *CASES, "--out", str(out)])
    found = {row["case"]: row for row in json.loads(out.read_text())}
    assert [row["error"] for row in found.values()] == [None] * len(CASES)
    assert found["full"]["gap"] < 1e-4
    assert found["full"]["truncated"] > 0.8
    assert found["full"]["phases"]["generate"] > 0
    assert found["sft-full"]["trained_per_second"] > 0
