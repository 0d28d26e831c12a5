"""`surogate eval --report`: figures of a run in its report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surogate_core.plugin import METRICS, run_directory
from surogate_core.service.files import add_evaluations, config_of_run

HELD_OUT = "held-out rows"
"""The benchmark of a loss."""


def add_to_reports(models: Sequence[str], figures: Sequence[Mapping[str, Any]]) -> None:
    """Add the figures of each model that is a run, or a part of one, to that run, and write its report anew, once."""
    from surogate_core.service.app import write_reports

    runs: list[Path] = []
    for model in models:
        config = config_of_run(model)
        if config is None:
            print(f"note: {model} is no run, so no report has its figures.", file=sys.stderr)
            continue
        run, path = config.absolute().parent, run_directory(model).absolute()
        part = "the run" if path == run else path.name
        add_evaluations(run, [row for one in figures if one["model"] == model for row in _rows(part, one)])
        runs.append(run)
    for run in dict.fromkeys(runs):
        if (run / METRICS).is_file():
            for file in write_reports([run]):
                print(f"Written: {_shown(file)}", file=sys.stderr)


def _shown(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _rows(part: str, one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    when = {"time": time.time(), "model": part}
    if "metric" in one:
        yield when | {name: one[name] for name in ("task", "metric", "value", "stderr", "rows")}
        return
    count = {"task": HELD_OUT, "rows": one["documents"]}
    yield when | count | {"metric": "loss", "value": one["loss"], "stderr": one["stderr"]}
    yield when | count | {"metric": "accuracy", "value": one["accuracy"], "stderr": None}
