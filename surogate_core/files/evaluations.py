"""evaluations.jsonl: figures of `surogate eval --report` beside the record of a run, one a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surogate_core.files.atomic import disk_error
from surogate_core.files.metrics import as_number, read_lines

EVALUATIONS = "evaluations.jsonl"
"""Name of the file in a run's output directory."""
TEXTS = ("model", "task", "metric")


def add_evaluations(directory: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append figures: `time`, `model`, `task`, `metric`, `value`, `stderr` (None if unknown) and `rows`."""
    path = directory / EVALUATIONS
    text = "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise disk_error(error, what="--report", path=path) from error


def read_evaluations(directory: Path) -> list[dict[str, Any]]:
    """The last figure of each model, task and metric, in the order in which they were measured; damaged lines are left
    out.
    """
    path, found = directory / EVALUATIONS, dict[tuple[str, ...], dict[str, Any]]()
    for row in read_lines(path) if path.is_file() else ():
        if all(isinstance(row.get(name), str) for name in TEXTS) and isinstance(row.get("value"), int | float):
            key = tuple(row[name] for name in TEXTS)
            found.pop(key, None)
            found[key] = row | {name: as_number(row.get(name)) for name in ("time", "stderr", "rows")}
    return list(found.values())
