"""Starting a run again from its last checkpoint after a failure that may pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from surogate_core.launch.child import Failure
from surogate_core.launch.forwarding import Forwarding

log = structlog.get_logger(__name__)


class Restarts:
    """The restarts of one run."""

    def __init__(self, config: Mapping[str, Any], most: int):
        """`config`: the job's. `most`: how many restarts there may be. Made before the run starts."""
        self._most = self._left = most
        self._checkpoints = Path(config["checkpoint_dir"] or config["output_dir"])
        # Another run's checkpoints, which this one was not to resume, are none of it.
        self._before = _saved(self._checkpoints)

    def run(self, start: Callable[[bool], int | Failure], signals: Forwarding) -> int:
        """Start the run until it ends; the exit code. Raises its last failure as a `SurogateError`.

        `start` (whether to resume the last checkpoint) starts all ranks, and returns when they are gone.
        """
        resume = False
        while True:
            result = start(resume)
            if isinstance(result, int):
                return result
            if signals.received is not None or not self._left or not result.may_pass:
                raise result.error()
            self._left -= 1
            resume = self._announce(result)

    def _announce(self, failure: Failure) -> bool:
        """Log the restart; whether there is a checkpoint to resume."""
        own = [name for name, written in _saved(self._checkpoints).items() if self._before.get(name) != written]
        where = f" from {max(own, key=_step)}" if own else ""
        number = f"restart {self._most - self._left} of {self._most}"
        log.warning(f"the run starts again{where} ({number}): {failure.message}")
        return bool(own)


def _saved(directory: Path) -> dict[str, int]:
    """Name of each checkpoint → when it was written."""
    return {file.parent.name: file.stat().st_mtime_ns for file in directory.glob("checkpoint-*/manifest.json")}


def _step(name: str) -> int:
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
