"""benchmarks/generate.py on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import generate
import pytest


def test_a_line_for_each_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    cases = ["bf16", "lora", "nf4", "transformers"]
    monkeypatch.setattr("sys.argv", ["generate.py", "--small", "--cases", *cases, "--out", str(out)])
    generate.main()
    found = json.loads(out.read_text())
    assert [row["case"] for row in found] == cases
    assert all(row["seconds"] * row["tokens_per_second"] == pytest.approx(4 * 8) for row in found)
    assert capsys.readouterr().out.count("tok/s") == len(cases)
