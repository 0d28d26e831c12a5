"""Reading metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""How numbers that JSON lacks are written."""

_ONCE_A_STEP = ("step_end", "eval_end")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records as they are in the file; a torn line, which a killed run may leave, is passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def read_metrics(path: str | Path, *, event: str | None = None) -> list[dict[str, Any]]:
    """The records of a run, or those of one `event`, in the order in which they happened.

    Each has `event`, `time` (seconds since 1970) and the event's fields; NaN and infinities are floats
    again. A step has at most one ``step_end`` and one ``eval_end``: the last that was written.
    """
    records: dict[object, dict[str, Any]] = {}
    for number, record in enumerate(read_lines(Path(path))):
        kind = record.get("event")
        if event is not None and kind != event:
            continue
        key = (kind, record.get("step")) if kind in _ONCE_A_STEP else number
        records.pop(key, None)
        records[key] = {name: value if name == "message" else _restored(value) for name, value in record.items()}
    return list(records.values())


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    return value
