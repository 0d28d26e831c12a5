"""Whole runs with the adaptive monitor: no bit changes unless asked, and resume is exact when asked."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.errors import UserError

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]

WILD = (
    "monitor=[jsonl,adaptive]",
    "lora=false",
    "learning_rate=8",
    "lr_scheduler_type=constant",
    "warmup_steps=60",
    "sequence_len=32",
    "per_device_train_batch_size=1",
    "gradient_accumulation_steps=1",
    "max_steps=48",
    "eval_steps=0",
    "save_steps=8",
    "save_total_limit=20",
)
"""A learning rate that is far too high: the loss jumps soon after step 20."""


@pytest.mark.slow
def test_it_changes_no_bit_unless_asked(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, history: History, digests: Digests
) -> None:
    run_here(tmp_path / "with", *base, *WILD)
    run_here(tmp_path / "without", *base, *WILD, "monitor=[jsonl]")
    rules = {line["rule"] for line in records(tmp_path / "with", "advice")}
    assert rules >= {"loss_spike", "warmup_too_short"}, "nothing went wrong, so nothing is shown"
    assert history(tmp_path / "with") == history(tmp_path / "without")
    assert digests(tmp_path / "with" / "checkpoint-48") == digests(tmp_path / "without" / "checkpoint-48")


@pytest.mark.slow
def test_resume_is_exact_while_a_reduction_blends_back(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, history: History, digests: Digests
) -> None:
    keys = [*base, *WILD, "auto_lr_reduction=true"]
    whole = tmp_path / "whole"
    run_here(whole, *keys)
    reductions = [line for line in records(whole, "notice") if "learning rate × 0.5" in line["message"]]
    assert reductions
    at = max(
        s
        for s in range(8, 48, 8)
        if json.loads((whole / f"checkpoint-{s}/state.json").read_text())["loop"]["lr_changes"]
    )
    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copytree(whole / f"checkpoint-{at}", killed / f"checkpoint-{at}")
    run_here(killed, *keys)
    assert history(killed) == [line for line in history(whole) if line[1] > at]
    assert digests(killed / "checkpoint-48") == digests(whole / "checkpoint-48")
    for name in ("phase_change", "advice"):
        after = [line for line in records(whole, name) if line["step"] > at]
        assert [{**line, "time": 0} for line in records(killed, name)] == [{**line, "time": 0} for line in after]
    ends = [json.loads((run / "checkpoint-48" / "state.json").read_text()) for run in (whole, killed)]
    assert ends[0]["monitors"]["adaptive"] == ends[1]["monitors"]["adaptive"]
    assert ends[0]["loop"] == ends[1]["loop"]


@pytest.mark.gpu
def test_a_checkpoint_changes_no_rate_on_a_gpu(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    # There a step is reported after the next was launched, unless a checkpoint follows it.
    keys = [*base, *WILD, "auto_lr_reduction=true", "device=cuda"]
    for every in (1, 0):
        run_here(tmp_path / str(every), *keys, f"save_steps={every}")
    rates = [[line["lr"] for line in records(tmp_path / str(every), "step_end")] for every in (1, 0)]
    assert rates[0] == rates[1]
    assert any("learning rate × 0.5" in line["message"] for line in records(tmp_path / "0", "notice"))


@pytest.mark.slow
def test_a_killed_process_goes_on_exactly(
    tmp_path: Path, base: list[str], run_here: RunHere, history: History, digests: Digests
) -> None:
    keys = [*base, *WILD, "auto_lr_reduction=true"]
    run_here(tmp_path / "whole", *keys)
    cut = tmp_path / "cut"
    program = "import sys; from surogate_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", program, *keys, f"output_dir={cut}"], stdout=subprocess.DEVNULL)
    try:
        while not (cut / "checkpoint-32" / "manifest.json").exists():
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    run_here(cut, *keys)
    assert history(cut) == history(tmp_path / "whole")
    assert digests(cut / "checkpoint-48") == digests(tmp_path / "whole" / "checkpoint-48")


@pytest.fixture
def nan_at_25(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 25 reports a loss and a gradient norm that are not numbers."""
    from surogate_core.engine.engine import StepResult

    read, count = StepResult.read, 0

    def once(self: StepResult) -> tuple[float, float]:
        nonlocal count
        count += 1
        return (math.nan, math.nan) if count == 25 else read(self)

    monkeypatch.setattr(StepResult, "read", once)


@pytest.mark.usefixtures("nan_at_25")
def test_the_guard_goes_on_after_a_step_that_is_not_finite(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    keys = [*base, *WILD, "learning_rate=1e-3", "warmup_steps=0", "max_steps=40", "auto_lr_reduction=true"]
    assert run_here(tmp_path, *keys) == 0
    rates = {line["step"]: line["lr"] for line in records(tmp_path, "step_end")}
    # The rate is halved at once and blends back over 50 steps.
    assert (rates[25], rates[26]) == (1e-3, 5e-4)
    assert rates[36] == pytest.approx(1e-3 * (0.5 + 0.5 * 10 / 50))
    assert "steps that were not finite | 1 " in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("nan_at_25")
def test_without_the_guard_such_a_step_ends_the_run(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    with pytest.raises(UserError, match="step 25: the loss is nan"):
        run_here(tmp_path, *base, *WILD, "learning_rate=1e-3", "warmup_steps=0", "max_steps=40")
    report = (tmp_path / "report.md").read_text()
    assert "**Failed: step 25 of 40" in report
    assert "step 25: the loss is nan" in report


@pytest.mark.slow
def test_early_stop_ends_a_converged_run(tmp_path: Path, base: list[str], run_here: RunHere, records: Records) -> None:
    keys = [*base, *WILD, "learning_rate=1e-6", "warmup_steps=0", "eval_steps=2", "save_steps=0"]
    assert run_here(tmp_path / "on", *keys, "early_stop=true") == 0
    (end,) = records(tmp_path / "on", "run_end")
    assert (end["reason"], end["step"]) == ("stopped", 16)  # the ninth evaluation; the first is before any step
    assert "early stop: converged: score 1.000 above 0.85" in end["message"]
    assert Path(end["export_path"]).is_dir()
    assert run_here(tmp_path / "off", *keys, "max_steps=20") == 0
    (end,) = records(tmp_path / "off", "run_end")
    assert (end["reason"], end["step"]) == ("finished", 20)


def test_epoch_adjustment_makes_up_the_token_budget(
    tmp_path: Path, base: list[str], run_here: RunHere, monkeypatch: pytest.MonkeyPatch, records: Records
) -> None:
    # 20 tokens a parameter are hours for any model; a hundredth of one are seconds.
    monkeypatch.setattr("surogate_core.run.notes.TOKENS_PER_PARAMETER", 0.02)
    keys = [*base, *WILD, "learning_rate=1e-4", "warmup_steps=0", "max_steps=-1", "save_steps=0", "num_epochs=7"]
    assert run_here(tmp_path, *keys, "epoch_adjustment=true") == 0
    (start,) = records(tmp_path, "run_start")
    assert start["epochs"] * start["train_tokens"] == pytest.approx(0.02 * start["parameters"], rel=0.05)
    assert any("instead of 7" in note for note in start["notes"])


@pytest.mark.slow
def test_auto_lr_reduction_rescues_a_run_that_diverges_without_it(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    keys = [key for key in base if key.startswith("data_cache_dir")]
    keys += [*WILD, "learning_rate=2", "warmup_steps=150", "max_steps=300", "save_steps=0", "device=cpu"]
    keys += ["sequence_len=64", "per_device_train_batch_size=2"]
    final = {}
    for reduces in (True, False):
        run_here(tmp_path / str(reduces), *keys, f"auto_lr_reduction={str(reduces).lower()}")
        first, *_, final[reduces] = [line["loss"] for line in records(tmp_path / str(reduces), "eval_end")]

    assert final[True] < first < final[False], final
