"""The table of benchmarks/recurrent_steps.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import recurrent_steps


def test_a_line_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["recurrent_steps.py", "--small", "--out", str(out)])
    recurrent_steps.main()
    found = json.loads(out.read_text())
    assert [row["op"] for row in found] == [
        "ssd_step",
        "causal_convolution_step",
        "gated_delta_step",
        "causal_convolution_step",
    ]
    assert all(row["equal"] and row["gb_per_s"] > 0 and row["error"] < 1e-6 for row in found)
    assert capsys.readouterr().out.count("GB/s") == len(found)
