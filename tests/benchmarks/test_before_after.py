"""benchmarks/before_after.py: figures, turns and failures, without running a benchmark."""

import json
from pathlib import Path

import before_after
import pytest
from before_after import CASES, compare, figure, main, table
from gpu_lora import make_parser


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"tokens_per_second": 5.0}, (5.0, "tok/s")),
        ([{"tokens_per_second": 5.0, "seconds": 2.0}], (5.0, "tok/s")),
        ([{"seconds": 2.0, "phases": {}}], (1800.0, "steps/h")),
    ],
)
def test_a_figure_is_read_from_the_results_of_each_script(fields: object, found: tuple[float, str]) -> None:
    assert figure(fields) == found


def test_the_trees_take_turns_and_a_failure_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measured(tree: Path, packages: Path | None, case: str, limit: float) -> tuple[float, str]:
        order.append(tree.name)
        if len(order) == 4:
            raise ValueError("out of memory")
        return float(len(order)), "tok/s"

    monkeypatch.setattr(before_after, "measured", measured)
    trees = {"ours": (Path("a"), None), "other": (Path("b"), None)}
    found = compare("lora-0.6b", trees, 2, 1.0)
    assert order == ["b", "a", "a", "b"]
    assert (found.ours, found.other, found.ratio) == ([2.0, 3.0], [1.0], 3.0)
    assert "| lora-0.6b | 1 tok/s | 3 tok/s | 3.000 |" in table([found])
    order.clear()
    out = tmp_path / "found.json"
    assert main([str(tmp_path), "--cases", "small", "--rounds", "1", "--out", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8"))[0]["ratio"] == 2.0


def test_a_case_without_a_ratio_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--cases", "small", "--rounds", "1", "--limit", "0.01"]) == 1
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize("case", [case for case, (script, *_) in CASES.items() if script == "gpu_lora.py"])
def test_the_options_of_a_case_are_known_to_its_script(case: str) -> None:
    make_parser().parse_args([*CASES[case][1:], "found.json"])
