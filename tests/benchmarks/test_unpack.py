"""The table of benchmarks/unpack.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import unpack


def test_a_line_for_each_format_and_projection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["unpack.py", "--small", "--out", str(out)])
    unpack.main()
    rows = json.loads(out.read_text())
    assert len(rows) == len(unpack.FORMATS) * len(unpack.SMALL)
    assert all(row["equal"] and row["all GB/s"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
