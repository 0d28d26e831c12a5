"""Checks of reports: each run has one, also one that failed early; a directory without a record has none."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from surogate_core.plugin import METRICS, UserError, bundles
from surogate_core.service.files import json_line
from surogate_testing.check import ensure
from surogate_testing.run_events import END, START, step

LENGTHS = {"a run": 3, "a run that failed before its first step": 0}


def writes_a_report_of_each_run(spec: bundles.ReportSpec) -> None:
    """It writes its files into the run's directory, and changes none that was there."""
    for name, steps in LENGTHS.items():
        with TemporaryDirectory() as place:
            run = Path(place)
            events = [*([START] if steps else []), *(step(at, 2.0) for at in range(1, steps + 1)), END]
            (run / METRICS).write_text("".join(f"{json_line(event, at=1.0)}\n" for event in events), encoding="utf-8")
            before = (run / METRICS).read_bytes()
            written = spec.write([run])
            ensure(bool(written), f"{name}: no file is returned")
            for file in written:
                ensure(file.is_file() and file.parent == run, f"{name}: {file} is no file in the run's directory")
            ensure((run / METRICS).read_bytes() == before, f"{name}: {METRICS} was changed")


def refuses_a_directory_without_a_record(spec: bundles.ReportSpec) -> None:
    """A directory without a record is an error of the user's, and is left as it is."""
    with TemporaryDirectory() as place:
        try:
            spec.write([Path(place)])
        except UserError:
            ensure(not list(Path(place).iterdir()), "it left a file")
        else:
            raise AssertionError("a directory without a record has a report")


CHECKS = (writes_a_report_of_each_run, refuses_a_directory_without_a_record)
