"""Recordings of runs compare as they should: any difference is found, norms may differ by what is allowed."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_bits.py"
RECORDING: dict[str, Any] = {
    "a run": {
        "losses": {"step_end 1": "6.9", "step_end 2": "6.8"},
        "norms": {"1": "1.0"},
        "rates": {"1": "0.1"},
        "tensors": {"model/model.safetensors": {"w": "torch.float32 [2] 00ff"}},
    }
}


def compare(tmp_path: Path, after: dict[str, Any], *more: str) -> tuple[int, str]:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file, value in zip(files, (RECORDING, after), strict=True):
        file.write_text(json.dumps(value))
    command = [sys.executable, str(SCRIPT), "compare", *map(str, files), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_equal_recordings(tmp_path: Path) -> None:
    code, text = compare(tmp_path, RECORDING)
    assert code == 0
    assert text == "1 runs, 5 figures and tensors: equal to the bit\n"


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("losses", "step_end 2", "6.8000000000000001"),
        ("losses", "step_end 3", "6.7"),
        ("rates", "1", "0.2"),
        ("norms", "1", "1.000001"),
        ("tensors", "model/model.safetensors", {"w": "torch.float32 [2] 00fe"}),
    ],
)
def test_one_difference_is_found(tmp_path: Path, place: str, key: str, value: Any) -> None:
    after = copy.deepcopy(RECORDING)
    after["a run"][place][key] = value
    code, text = compare(tmp_path, after)
    assert code == 1
    assert text.startswith(f"a run: {place} {key}")
    assert "1 differ" in text


def test_a_missing_run_is_a_difference(tmp_path: Path) -> None:
    code, text = compare(tmp_path, {})
    assert code == 1
    assert "a run: recorded before only" in text


def test_norms_may_differ_by_what_is_allowed(tmp_path: Path) -> None:
    after = copy.deepcopy(RECORDING)
    after["a run"]["norms"]["1"] = "1.000001"
    assert compare(tmp_path, after, "--norms", "1e-5")[0] == 0
    assert compare(tmp_path, after, "--norms", "1e-7")[0] == 1
