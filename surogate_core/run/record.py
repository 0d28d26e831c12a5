"""The record of a run in its output directory, and the move of an earlier run's record.

The record is `config.yaml`, `run.json`, the metrics, the report, evaluations and the exports. It is written only after
the run is accepted: after its configuration, checkpoint, base and data are checked. A new run in the directory of
another one moves that one's record to ``former-1/`` (``former-2/``, …), which is a run directory of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from surogate_core.errors import UserError
from surogate_core.files import atomic
from surogate_core.files.evaluations import EVALUATIONS
from surogate_core.files.foreign import read_json
from surogate_core.files.metrics import METRICS
from surogate_core.files.run_lock import LOCK
from surogate_core.hf.lora_files import MARKER

FACTS = "run.json"
"""Name of the file with the facts of a run, in its output directory."""
CONFIG = "config.yaml"
PATIENCE = 0.2
"""Seconds to wait for the lock: who asks whether a run is going on holds it for less."""
_BESIDE = ("report.html", "report.md", EVALUATIONS)
_EXPORTS = ("adapter", "model")


def new_run_id() -> str:
    """An id that no other run has."""
    return secrets.token_hex(8)


class EarlierRecord:
    """The record that was in an output directory when the run began."""

    def __init__(self, output: Path):
        """`output` exists and is locked by this run."""
        self._output = output
        exports = [output / name for name in _EXPORTS if (output / name / MARKER).is_file()]
        self.exists = (output / FACTS).is_file() or bool(exports)
        """Whether a run was accepted here; the files of a failed start are no record."""
        self.run = _run_id(output / FACTS)
        """Id of the run; empty in a record of a version before run ids."""

    def is_of_another_run(self, run: str) -> bool:
        """Whether there is a record of a run with another id."""
        return self.exists and self.run != run

    def set_aside(self) -> Path:
        """Move the record into a directory of its own beside the new one; raises `UserError` or `MachineError`."""
        number = 1
        while (former := self._output / f"former-{number}").exists():
            number += 1
        # The file that marks a record is moved last, so the next start finishes an interrupted move.
        moved = [path for name in _EXPORTS if ((path := self._output / name) / MARKER).is_file()]
        moved += [self._output / name for name in _BESIDE]
        moved += [self._output / METRICS, self._output / CONFIG, self._output / FACTS]
        try:
            former.mkdir()
            for path in moved:
                if path.exists():
                    path.rename(former / path.name)
        except OSError as error:
            raise atomic.disk_error(error, what="output_dir", path=former) from error
        return former


def _run_id(facts: Path) -> str:
    if not facts.is_file():
        return ""  # opening a pipe would wait forever
    try:
        values = read_json(facts)
    except (OSError, ValueError):
        return ""
    return str(values.get("run", "")) if isinstance(values, dict) else ""


@contextmanager
def locked(directory: Path, *, key: str) -> Iterator[None]:
    """Hold the directory's lock; `UserError` when another run has it."""
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=PATIENCE, poll_interval=0.02)
    except Timeout as error:
        raise UserError(
            f"{key} {directory}: another run is writing there. Fix: wait for it, or set another {key}."
        ) from error
    except OSError as error:
        fix = f"remove what is in the way, or set another {key}"
        raise atomic.disk_error(error, what=key, path=directory / LOCK, fix=fix) from error
    try:
        yield
    finally:
        lock.release()
