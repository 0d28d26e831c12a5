"""What a report has of a run's records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from surogate_command_report.contents import evaluations, ranks, sections

from surogate_core.service.files import EVALUATIONS, RunRecord, add_evaluations


def run_of(**figures: Any) -> RunRecord:
    run = RunRecord(directory=Path("run"), name="run")
    run.add({"event": "rank_stats", "step": 3, **figures})
    return run


def test_each_rank_has_its_figures() -> None:
    run = run_of(peak_memory_bytes=[2**30, 12 * 2**30], work_seconds=[0.0123, 0.2])
    assert ranks(run) == [("0", "1.00 GiB", "12.3 ms"), ("1", "12.0 GiB", "200 ms")]
    assert [part.title for part in sections(run)] == ["Ranks"]
    assert ranks(run_of(peak_memory_bytes=[2**30, 2**30])) == [("0", "1.00 GiB", ""), ("1", "1.00 GiB", "")]
    run.add({"event": "run_start"})
    assert ranks(run) == [], "a run that is resumed on one GPU has none"


@pytest.mark.parametrize("damaged", [{}, {"peak_memory_bytes": 5}, {"peak_memory_bytes": "many"}])
def test_damaged_figures_of_ranks_are_left_out(damaged: dict[str, Any]) -> None:
    assert ranks(run_of(**damaged)) == []


def test_evaluations_have_the_last_figure_of_each_task(tmp_path: Path) -> None:
    row = {
        "time": 1e9,
        "model": "the run",
        "task": "sums",
        "metric": "accuracy",
        "value": 0.25,
        "stderr": 0.1,
        "rows": 1200,
    }
    add_evaluations(tmp_path, [row, row | {"task": "words", "stderr": None}])
    add_evaluations(tmp_path, [row | {"value": 0.5}])
    with (tmp_path / EVALUATIONS).open("a") as file:
        file.write('{"model": 3}\n{"model": "the run", "task": "torn", "metric": "accuracy", "value": "x"}\n{"mod')
    run = RunRecord(directory=tmp_path, name="run")
    run.read_files()
    assert [found[:6] for found in evaluations(run)] == [
        ("the run", "words", "accuracy", "0.2500", "", "1,200"),
        ("the run", "sums", "accuracy", "0.5000", "0.1000", "1,200"),
    ]
    assert [part.title for part in sections(run)] == ["Evaluations"]
