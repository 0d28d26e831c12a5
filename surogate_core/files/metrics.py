"""metrics.jsonl, the record of a run: strict JSON, one event per line. Only this module writes and reads the format."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from surogate_core.events import (
    BlockFigures,
    Event,
    Progress,
    ReportWritten,
    Rollouts,
    RolloutSamples,
    RoutingStats,
    RunEnd,
    RunStart,
    StepEnd,
    strict_json,
)
from surogate_core.files.private import regular

METRICS = "metrics.jsonl"
"""Name of the file in a run's output directory."""

NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""Numbers that JSON lacks, and their text."""

SECONDS = 0.5
"""Time between two writes of steps."""

_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_ONCE_A_STEP = ("step_end", "eval_end", "block_figures", "routing_stats", "rollouts", "rollout_samples", "rollout_eval")


# -------------------------------------------------------------------------------- reading


def parsed(line: str | bytes) -> dict[str, Any] | None:
    """The record of one line; None for a torn line, which a killed run may leave."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records as they are in the file, without torn lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if (record := parsed(line)) is not None:
                yield record


def read_metrics(path: str | Path, *, event: str | None = None) -> list[dict[str, Any]]:
    """The records of a run, or of one `event`, in the order in which they happened.

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


def as_number(value: Any) -> float:
    """A field of a record as a float; NaN where there is no number."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, math.nan)
    return math.nan if value is None else float(value)


def has_run(path: Path) -> bool:
    """Whether the file has events of a run that reached its start."""
    # Opening a pipe would wait forever.
    return path.is_file() and any(r.get("event") in ("run_start", "step_end") for r in read_lines(path))


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        return {name: _restored(item) for name, item in value.items()}
    return value


# -------------------------------------------------------------------------------- writing


class MetricsWriter:
    """Writes every event as one line, in order: figures of steps twice a second, other events at once.

    Writing a single line costs the loop ten times as much as a line in a group, because a step leaves the caches cold.
    After `flush` the file has every event so far, so that a checkpoint never has more steps than the file. A run that
    resumes at step s drops the records of later steps that a killed run left, so that no step has two. A run that
    starts anew moves an earlier run's file to ``<name>.1`` (``.2``, …). A start that fails before its first step leaves
    the file of an earlier run as it is, and writes its few events where there is none.
    """

    def __init__(self, path: Path, *, progress: bool = False):
        """`progress`: also write progress events, of which there are many. No file is opened before the run's start."""
        self._path = path
        self._progress = progress
        # Only the run's start determines what to keep of an earlier file.
        self._file: IO[bytes] | None = None
        self._waiting: deque[tuple[float, Event]] = deque()
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._error: Exception | None = None

    def add(self, event: Event) -> None:
        """Take the event; raises the error of an earlier write."""
        if self._error is not None:
            raise self._error
        if isinstance(event, StepEnd | BlockFigures | RoutingStats | Rollouts | RolloutSamples):
            self._waiting.append((time.time(), event))
        elif isinstance(event, ReportWritten):
            pass  # The report is made from this file, which ends with the run's end.
        elif self._progress or not isinstance(event, Progress):
            if isinstance(event, RunStart):
                self._begin(event.start_step)
            self._waiting.append((time.time(), event))
            if isinstance(event, RunEnd) and self._file is None:
                self._write_failed_start()
            self.flush()

    def flush(self) -> None:
        """Write the pending events."""
        with self._writing:
            if self._file is None:
                return
            lines = []
            while self._waiting:
                at, event = self._waiting.popleft()
                lines.append(json_line(event, at=at))
            if lines:
                self._file.write("".join(lines).encode())

    def close(self) -> None:
        """Close the file; a run that failed before its start leaves its few events where no earlier run's are."""
        if self._file is None and self._waiting:
            self._write_failed_start()
        self._close()

    def _begin(self, start_step: int) -> None:
        self._close()
        if not has_run(self._path):
            self._path.unlink(missing_ok=True)
        elif start_step == 0:
            self._path.replace(_free_name(self._path))
        else:
            drop_after(self._path, start_step)
        self._open()
        threading.Thread(target=self._write_often, args=(self._over,), name="metrics", daemon=True).start()

    def _write_failed_start(self) -> None:
        if has_run(self._path):
            self._waiting.clear()
        else:
            self._path.unlink(missing_ok=True)
            self._open()

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "ab+", opener=regular) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        # Unbuffered: the kernel has a line when `write` returns.
        self._file = os.fdopen(regular(self._path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)

    def _close(self) -> None:
        self._over.set()
        if self._file is not None:
            try:
                self.flush()
            finally:
                with self._writing:
                    self._file.close()
                    self._file = None
        self._over = threading.Event()

    def _write_often(self, over: threading.Event) -> None:
        while not over.wait(SECONDS):
            try:
                self.flush()
            except Exception as error:
                self._error = error
                return


def json_line(event: Event, *, at: float) -> str:
    """One event as a line of strict JSON; `at` is in seconds since 1970."""
    parts = [f'"event": "{event.name}", "time": {round(at, 3)!r}']
    for name in event.__dataclass_fields__:
        value = getattr(event, name)
        kind = type(value)
        plain = kind is int or (kind is float and math.isfinite(value))
        parts.append(f'"{name}": {value!r}' if plain else f'"{name}": {_ENCODER.encode(strict_json(value))}')
    return f"{{{', '.join(parts)}}}\n"


def drop_after(path: Path, step: int) -> None:
    """Take the records of steps after `step`, and torn lines, out of the file; atomic."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(temporary, "x", encoding="utf-8", opener=regular) as file:
        for record in read_lines(path):
            at = record.get("step")
            if not isinstance(at, int) or at <= step:
                file.write(json.dumps(record, allow_nan=False, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free
