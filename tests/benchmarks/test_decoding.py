"""The table of benchmarks/decoding.py."""

from __future__ import annotations

import json
from pathlib import Path

import decoding
import pytest


def test_a_line_for_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["decoding.py", "--small", "--variants", "reference", "--out", str(out)])
    decoding.main()
    found = json.loads(out.read_text())
    assert [(row["case"], row["lengths"]) for row in found] == [
        ("attention", "even"),
        ("attention", "mixed"),
        ("choose", ""),
        ("filters", ""),
    ]
    assert all(row["equal"] and row["gb_per_s"] > 0 for row in found)
    assert capsys.readouterr().out.count("GB/s") == len(found)
