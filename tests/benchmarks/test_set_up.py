"""The benchmark of a start: it ends, and every second belongs to a phase."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import set_up


def test_files_of_caches_are_counted(tmp_path: Path) -> None:
    for name in ("surogate/compiled/v/inductor/a/b.py", "surogate/compiled/v/triton/c", "surogate/plan.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert set_up.counted(tmp_path) == {"inductor": 1, "triton": 1, "surogate": 1}


def test_the_slowest_imports_come_first() -> None:
    lines = [
        "import time: self [us] | cumulative | imported package",
        "import time: 1 | 5 | a",
        "import time: 2 | 9 | b",
    ]
    assert set_up.slowest_imports("\n".join(["a warning", *lines]), 1) == [lines[2]]


@pytest.mark.slow
def test_every_start_is_measured_with_its_phases(tmp_path: Path) -> None:
    words = ["--tiny", "--device", "cpu", "--models", "0.6b", "--runs", "1", "--profile"]
    line = [sys.executable, set_up.__file__, *words, "--dir", str(tmp_path / "models"), "--out", str(tmp_path / "out")]
    subprocess.run(line, check=True, cwd=tmp_path)
    starts = json.loads((tmp_path / "out/set_up.json").read_text())["starts"]
    assert [one["kind"] for one in starts] == ["cold", "warm", "profile", "imports"]
    assert len({one["loss"] for one in starts}) == 1
    for one in starts:
        # Each phase is rounded to a tenth, and those below it are left out.
        assert sum(one["phases"].values()) == pytest.approx(one["seconds"], abs=1)
        assert {"process", "importing torch", "loading the tokenizer", "first step"} <= one["phases"].keys()
    assert "cumulative" in (tmp_path / "out/profile-0.6b.txt").read_text()
