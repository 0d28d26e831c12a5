"""The inputs and the table of benchmarks/experts.py."""

from __future__ import annotations

import json
from pathlib import Path

import experts
import pytest
import torch

CPU = torch.device("cpu")


@pytest.mark.parametrize(("skew", "bounds"), [(1.0, (1.0, 1.0)), (10.0, (9.5, 12.0))])
def test_the_largest_load_is_what_is_asked_for(skew: float, bounds: tuple[float, float]) -> None:
    made = experts.setup(experts.Shape(), 4096, skew, CPU, torch.bfloat16)
    loads = torch.diff(made.routes[4], prepend=torch.zeros(1, dtype=torch.int32)) / (4096 * 8 / 128)
    assert bounds[0] <= loads.max() <= bounds[1]


def test_a_line_for_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["--small", "--loads", "zipf", "--cases", "product", "factors", "combined_full", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["experts.py", *words])
    experts.main()
    found = json.loads(out.read_text())
    assert {(row["case"], row["variant"]) for row in found} >= {
        ("product", "torch"),
        ("product", "masked"),
        ("combined_full", "reference"),
    }
    assert not any(row["variant"] == "unpadded" for row in found), "it is not asked for"
    assert all(row["equal"] and row["error"] < 1e-5 for row in found)
    assert capsys.readouterr().out.count("TFLOP/s") == len(found)


def test_what_may_never_end_runs_where_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    made = experts.setup(experts.SMALL, 64, 1.0, CPU, torch.float32)
    for names, found in (["unp"], ["torch"]), (["unpadded"], ["torch", "unpadded"]):
        rows = experts.measure("factors", experts.factors(made), made, "even", names, 1)
        assert [row.variant for row in rows] == found
