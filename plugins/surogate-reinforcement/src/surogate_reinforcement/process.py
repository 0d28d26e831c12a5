"""One worker process of a pool: started when it is needed, killed with all that it started when it takes too long."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any, cast, get_args

from surogate_core.plugin import bundles
from surogate_reinforcement import shapes, worker
from surogate_reinforcement.frames import GoneError, LateError, Pipe, TooLargeError, packed
from surogate_reinforcement.guardian import TOKEN, Guardian

BUILD_SECONDS = 300.0
"""Seconds to import a plugin and to build its environment, which may read a file, where no other limit is given."""
_LINE = 300
"""Characters of a fault's line."""
_LAST_WORDS = 1.0
"""Seconds in which a process that has closed its pipe ends too."""
REFUSED = "refused"
"""Reason of the fault of an environment that says what is wrong with its options."""
BUILD_LATE = "the build took more than"
"""Beginning of the line of a fault whose environment was not built in time."""


class WorkerProcess:
    """A process of `worker.py`, and its guardian."""

    def __init__(self, given: Mapping[str, Any], timeout: float, build_timeout: float = BUILD_SECONDS) -> None:
        """`given`: what the worker reads first. `timeout`, `build_timeout`: seconds of each request, of the build."""
        self._given, self._timeout, self._build_timeout = given, timeout, build_timeout
        self._guardian: Guardian | None = None
        self._pipe: Pipe
        self._token = ""
        self._life = 1
        self._asked_for = 0
        """Number of the last request, which its answer repeats."""
        self._is_building = False
        """Whether the environment was asked for and nothing was heard of it yet."""
        self._built_by = 0.0
        """Time of `time.monotonic` at which the build is late."""

    def life(self) -> int:
        """The number of the process, from 1; episodes of an earlier one are lost."""
        if self._guardian is not None and not self._guardian.is_running():
            self.close()  # It ended between two requests, so no episode is at fault.
        return self._life

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a request, or a `Fault`."""
        if (fault := self._built()) is not None:
            return fault
        deadline = time.monotonic() + self._timeout
        try:
            self._send(do, deadline, arguments)
        except TooLargeError as error:
            return bundles.Fault(reason="size", detail=f"the reply has {error}")
        except (ValueError, RecursionError) as error:  # A problem of a worker's that says more than JSON can.
            return bundles.Fault(reason="invalid", detail=f"{do} cannot be asked for: {error}"[:_LINE])
        except (LateError, GoneError) as error:
            return self._lost(error, f"{do} took more than {self._timeout:g} s")
        return self._answer(do, deadline, f"{do} took more than {self._timeout:g} s")

    def begin(self) -> None:
        """Start it, and do not wait for it."""
        self._start()
        self._is_building = True
        self._built_by = time.monotonic() + self._build_timeout
        # Whoever asks it first hears what went wrong.
        with contextlib.suppress(LateError, GoneError):
            self._pipe.send(packed(self._given), self._built_by)
            self._send("build", self._built_by, {})

    def build(self) -> Any:
        """Start it: the facts of the environment, or a `Fault` whose reason may be `REFUSED`."""
        fault = self._built()
        return self._facts if fault is None else fault

    def kill(self) -> None:
        """Kill it while another thread waits for its answer, which will be a fault."""
        guardian = self._guardian
        if guardian is not None:
            guardian.close()

    def close(self) -> None:
        """Kill it, with all processes that it has started. It may be asked again."""
        if self._guardian is None:
            return
        self._guardian.close()
        self._guardian, self._is_building = None, False
        self._life += 1
        self._pipe.close()

    def _built(self) -> bundles.Fault | None:
        """Start it if it is not running, and wait until it has its environment."""
        if self._guardian is None:
            self.begin()
        if not self._is_building:
            return None
        self._facts = self._answer("build", self._built_by, f"{BUILD_LATE} {self._build_timeout:g} s")
        self._is_building = False
        if isinstance(self._facts, bundles.Fault):
            self.close()
            return self._facts
        return None

    def _start(self) -> None:
        self._token = uuid.uuid4().hex
        to_read, answers = os.pipe()
        requests, to_write = os.pipe()
        isolation = "-I" if sys.flags.isolated else "-P"
        command = [sys.executable, isolation, "-m", worker.__name__, str(requests), str(answers)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            guardian = Guardian(command, (requests, answers), {**os.environ, **threads, TOKEN: self._token})
        finally:
            os.close(requests)
            os.close(answers)
        self._guardian = guardian
        self._pipe = Pipe(to_read, to_write, alive=guardian.is_running)

    def _send(self, do: str, deadline: float, arguments: Mapping[str, Any]) -> None:
        self._asked_for += 1
        self._pipe.send(packed({"do": do, "with": arguments, "number": self._asked_for}), deadline)

    def _answer(self, do: str, deadline: float, late: str) -> Any:
        """The answer to the last request, as `shapes` checks it, or a `Fault`. `late`: the line if there is none."""
        try:
            answer = self._pipe.receive(deadline)
        except (LateError, GoneError) as error:
            return self._lost(error, late)
        with contextlib.suppress(shapes.InvalidError):
            match answer:
                case {"ok": value, "number": self._asked_for}:
                    return shapes.ANSWERS[do](value)
                case {"fault": [str(reason), str(detail)], "number": self._asked_for}:
                    if reason in get_args(bundles.FaultReason) or (do == "build" and reason == REFUSED):
                        return bundles.Fault(reason=cast("bundles.FaultReason", reason), detail=detail[:_LINE])
        # Code of the environment has written to the pipe, so what follows in it would be no answer either.
        self.close()
        return bundles.Fault(reason="exit", detail=f"the worker process sent no answer to {do}")

    def _lost(self, error: LateError | GoneError, late: str) -> bundles.Fault:
        """End the process; why it has not answered."""
        detail = late if isinstance(error, LateError) else self._end()
        self.close()
        return bundles.Fault(reason="timeout" if isinstance(error, LateError) else "exit", detail=detail)

    def _end(self) -> str:
        """How the process ended, in one line."""
        assert self._guardian is not None
        code, said = self._guardian.ended(_LAST_WORDS)
        if code is None:
            return "the worker process closed its pipe, or wrote into it what is no answer"
        how = f"exit code {code}" if code >= 0 else _signal_name(-code)
        last = next((" ".join(line.split()) for line in reversed(said.split("\n")) if line.strip()), "")
        return f"the worker process ended, {how}" + (f": {last[:_LINE]}" if last else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
