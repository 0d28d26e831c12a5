"""benchmarks/generate.py on a CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import generate
import pytest


def test_a_line_for_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    cases = ["bf16", "lora", "nf4", "drafts", "transformers"]
    monkeypatch.setattr("sys.argv", ["generate.py", "--small", "--within", "--cases", *cases, "--out", str(out)])
    generate.main()
    found = json.loads(out.read_text())
    assert [row["case"] for row in found] == cases
    assert all(row["seconds"] * row["tokens_per_second"] == pytest.approx(4 * 8) for row in found)
    assert capsys.readouterr().out.count("tok/s") == len(cases)


def test_a_case_that_fails_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines = tmp_path / "found.json", []

    def run(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        lines.append(line)
        return subprocess.CompletedProcess(line, 1, stderr="Traceback\nValueError: too large\n")

    monkeypatch.setattr(subprocess, "run", run)
    generate.main(["--small", "--cases", "bf16", "lora", "--out", str(out)])
    assert [(row["case"], row["error"]) for row in json.loads(out.read_text())] == [
        ("bf16", "ValueError: too large"),
        ("lora", "ValueError: too large"),
    ]
    assert [line[line.index("--within") - 1] for line in lines] == ["bf16", "lora"]
    assert capsys.readouterr().out.count("too large") == 2


def test_wrong_drafts_in_all_rows_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate.Repeats, "next", generate.Repeats.next)  # so that it is put back
    out = tmp_path / "found.json"
    generate.main(["--small", "--within", "--cases", "wrong", "--slots", "16", "--out", str(out)])
    (found,) = json.loads(out.read_text())
    assert found["right"] < 1
    assert found["seconds"] * found["tokens_per_second"] == pytest.approx(4 * 8)
