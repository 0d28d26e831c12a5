"""The page's figures and arithmetic, run by node: tiles, outcome, readout, pinch. Skipped where node is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from surogate_core.report.records import RunRecord
from surogate_core.report.serve import figures

NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")


def evaluate(*expressions: str, **names: Any) -> list[Any]:
    """The values of the expressions, in which the functions of figures.js and `names` are known."""
    assert NODE is not None
    script = resources.files("surogate_core.report.page").joinpath("figures.js").read_text(encoding="utf-8")
    given = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in names.items())
    script += f"{given}process.stdout.write(JSON.stringify([{', '.join(expressions)}]));"
    found = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, check=True, timeout=60)
    values: list[Any] = json.loads(found.stdout)
    return values


def shown(*records: Mapping[str, Any]) -> dict[str, Any]:
    run = RunRecord(directory=Path("r"), name="r", live=True)
    for record in records:
        run.add(record)
    found: dict[str, Any] = figures([run])["runs"][0]
    return found


STEP = {
    "event": "step_end", "step": 7, "loss": 2.123456, "grad_norm": 1.0, "lr": 2e-4, "tokens_per_second": 93_512.3,
    "peak_memory_bytes": 541_790_208, "seconds": 0.5, "total_tokens": 1_234_567, "speed_of_light": 0.174_56,
}  # fmt: skip


def test_tiles_have_what_was_measured_and_no_more() -> None:
    start = {"event": "run_start", "steps": 9}
    (cpu, gpu, nothing) = evaluate(
        "tiles(cpu)",
        "tiles(gpu)",
        "tiles(nothing)",
        cpu=shown(start, STEP),
        gpu=shown(
            start,
            STEP,
            {"event": "eval_end", "step": 5, "loss": 2.5},
            {"event": "phase_change", "step": 6, "phase": "plateau"},
            {"event": "gpu_stats", "step": 7, "utilization": 0.987, "power_watts": 655.4},
        ),
        nothing=shown(start),
    )
    assert dict(cpu) == {
        "loss": "2.123", "learning rate": "2.0e-4", "gradient norm": "1", "tokens/s": "93.51k",
        "tokens": "1.235M", "peak memory": "0.50 GiB", "speed of light": "17.5 %",
    }  # fmt: skip
    assert dict(gpu) == {**dict(cpu), "held-out loss": "2.5", "phase": "plateau", "GPU": "99 % · 655 W"}
    assert nothing == []


def test_a_latest_value_that_is_not_finite_is_named() -> None:
    (first, later) = evaluate(
        "tiles(first)",
        "tiles(later)",
        first=shown({**STEP, "loss": "NaN"}),
        later=shown(STEP, {**STEP, "step": 8, "loss": "Infinity", "grad_norm": "NaN"}),
    )
    assert dict(first)["loss"] == dict(later)["loss"] == dict(later)["gradient norm"] == "not finite"


def test_outcome_of_one_and_of_several_runs() -> None:
    run = {"outcome": "running", "over": False, "step": 10, "steps": 70, "seconds": 1.5, "task": None, "message": ""}
    over = {**run, "outcome": "finished", "over": True, "step": 70}
    failed = {**run, "outcome": "failed", "over": True, "step": 0, "message": "no data"}
    begun = {**run, "step": 0, "steps": None, "seconds": None, "task": {"task": "packing", "done": 3, "total": 9}}
    assert evaluate(
        "outcome([run])", "outcome([over])", "outcome([failed])", "outcome([begun])", "outcome([over, run, over])",
        run=run, over=over, failed=failed, begun=begun,
    ) == [
        "running · step 10 of 70 · 0:01:30 to go",
        "finished · step 70 of 70",
        "failed before its first step: no data",
        "running · step 0 of ? · packing 3/9",
        "2 finished, 1 running",
    ]  # fmt: skip


def test_a_readout_says_at_which_step_a_value_was_measured() -> None:
    steps = [10, 20, 30]
    line = {"name": "", "steps": steps, "values": [1.0, None, 3.0], "means": None, "dots": False}
    means = {**line, "means": [1.0, None, 2.0]}
    dots = {"name": "", "steps": [0, 30], "values": [9.0, 4.0], "means": None, "dots": True}
    short = {**line, "name": "b", "steps": [5, 12], "values": [7.0, 8.0]}
    assert evaluate(
        "readout([line, dots], 13)", "readout([line], 21)", "readout([means], 29)", "readout([line, short], 30)",
        "readout([line], 99)", line=line, dots=dots, means=means, short=short,
    ) == [
        "step 10: 1 · held-out 9 at 0",
        "step 20: not finite",
        "step 30: 3 (mean 2)",
        "step 30: 3",
        "",
    ]  # fmt: skip


def test_a_pinch_keeps_the_steps_under_the_fingers() -> None:
    out, aside, whole, crossed, point = evaluate(
        "pinched([40, 60], [0.3, 0.7], [0, 100])",
        "pinched([0, 50], [0.5, 0.999], [0, 100])",
        "pinched([20, 80], [0.45, 0.55], [0, 100])",
        "pinched([40, 60], [0.7, 0.3], [0, 100])",
        "pinched([50, 50.01], [0, 1], [0, 100])",
    )
    assert out == pytest.approx([25, 75])
    assert aside is None
    assert whole is crossed is None
    assert point == pytest.approx([50, 52])
