"""Writing metrics.jsonl: strict JSON, one event a line, one history whatever was killed in between."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from surogate_core.events import (
    Control,
    Event,
    Progress,
    ReportWritten,
    RunEnd,
    RunInfo,
    RunStart,
    StepEnd,
    strict_json,
)
from surogate_core.files.private import regular
from surogate_monitor_jsonl.reader import read_lines

_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)

SECONDS = 0.5
"""Time between two writes of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlOptions:
    """Options of the JSONL monitor."""

    file: str = "metrics.jsonl"
    """Name of the file in `output_dir`."""
    progress: bool = False
    """Also write progress events, which are many."""


class JsonlMonitor:
    """Writes every event as one line: steps twice a second, all else at once, in their order.

    A line by itself costs the loop ten times what it costs in a group, with all that it needs out of the caches.
    A checkpoint never has more steps than the file: `state`, which it asks for, writes what waits. A run that resumes
    at step s drops the records of later steps that a killed run left, so that no step has two. A run that starts anew
    moves an earlier run's file to ``<name>.1`` (``.2``, …). A start that fails before its first step leaves the file
    of an earlier run as it is, and writes its few events where there is none.
    """

    def __init__(self, options: JsonlOptions, info: RunInfo):
        self._path = Path(info.output_dir) / options.file
        self._progress = options.progress
        # Before the run's start the file is not opened: only then is it known what to keep of it.
        self._file: IO[bytes] | None = None
        self._waiting: deque[tuple[float, Event]] = deque()
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._error: Exception | None = None

    def on_event(self, event: Event) -> Control | None:
        """Take the event; raises what a write of earlier ones raised."""
        if self._error is not None:
            raise self._error
        if isinstance(event, StepEnd):
            self._waiting.append((time.time(), event))
        elif isinstance(event, ReportWritten):
            pass  # The report is made from this file, which ends with the run's end.
        elif self._progress or not isinstance(event, Progress):
            if isinstance(event, RunStart):
                self._begin(event.start_step)
            self._waiting.append((time.time(), event))
            if isinstance(event, RunEnd) and self._file is None:
                self._write_failed_start()
            self._write_waiting()
        return None

    def state(self) -> dict[str, Any]:
        """Nothing: the file itself is the state, and has all events so far when this returns."""
        self._write_waiting()
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

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
        # Unbuffered: a line is on its way to the disk when `write` returns.
        self._file = os.fdopen(regular(self._path, os.O_WRONLY | os.O_APPEND), "ab", buffering=0)

    def _close(self) -> None:
        self._over.set()
        if self._file is not None:
            try:
                self._write_waiting()
            finally:
                with self._writing:
                    self._file.close()
                    self._file = None
        self._over = threading.Event()

    def _write_often(self, over: threading.Event) -> None:
        while not over.wait(SECONDS):
            try:
                self._write_waiting()
            except Exception as error:
                self._error = error
                return

    def _write_waiting(self) -> None:
        with self._writing:
            if self._file is None:
                return
            lines = []
            while self._waiting:
                at, event = self._waiting.popleft()
                lines.append(json_line(event, at=at))
            if lines:
                self._file.write("".join(lines).encode())


def has_run(path: Path) -> bool:
    """Whether the file has anything of a run that got as far as its start."""
    # To open a pipe would wait for ever.
    return path.is_file() and any(r.get("event") in ("run_start", "step_end") for r in read_lines(path))


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


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


def json_line(event: Event, *, at: float) -> str:
    """One event as a line of strict JSON; `at` is in seconds since 1970."""
    parts = [f'"event": "{event.name}", "time": {round(at, 3)!r}']
    for name in event.__dataclass_fields__:
        value = getattr(event, name)
        kind = type(value)
        plain = kind is int or (kind is float and math.isfinite(value))
        parts.append(f'"{name}": {value!r}' if plain else f'"{name}": {_ENCODER.encode(strict_json(value))}')
    return f"{{{', '.join(parts)}}}\n"
