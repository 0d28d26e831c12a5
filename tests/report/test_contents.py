"""What a report has of a run's records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surogate_core.report.contents import ranks, sections
from surogate_core.report.records import RunRecord


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
