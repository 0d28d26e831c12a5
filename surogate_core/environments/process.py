"""One worker process of a pool: started when it is needed, killed with all that it started when it takes too long."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from surogate_core.bundles.environments import Fault, FaultReason
from surogate_core.environments import worker
from surogate_core.environments.frames import GoneError, LateError, Pipe, TooLargeError, packed
from surogate_core.environments.guardian import TOKEN, marked

_BUILD_SECONDS = 300.0
"""Longest time to import a plugin and to build its environment, which may read a file."""
_ROUNDS = 50
"""How often processes that fork while they are killed are looked for again."""
_LINE = 300
_SAID = 1 << 20
"""Bytes of the environment's stderr that are kept; its end is shown if the process ends."""
REFUSED = "refused"
"""Reason of the fault of an environment that says what is wrong with its options."""


class WorkerProcess:
    """A process of `worker.py`."""

    def __init__(self, given: Mapping[str, Any], timeout: float, mark: str) -> None:
        """`given`: what the worker reads first. `timeout`: seconds of each request. `mark`: the guardian's."""
        self._given, self._timeout, self._mark = given, timeout, mark
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Pipe
        self._token = ""
        self._directory: Path
        self._life = 1
        self._is_building = False
        """Whether the environment was asked for and nothing was heard of it yet."""

    def life(self) -> int:
        """The number of the process, from 1; episodes of an earlier one are lost."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # It ended between two requests, so no episode is at fault.
        return self._life

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer to a request, or a `Fault`."""
        if (fault := self._built()) is not None:
            return fault
        return self._asked(do, self._timeout, arguments)

    def begin(self) -> None:
        """Start it, and do not wait for it."""
        self._start()
        self._is_building = True
        # Whoever asks it first hears what went wrong.
        with contextlib.suppress(LateError, GoneError):
            deadline = time.monotonic() + _BUILD_SECONDS
            self._pipe.send(packed(self._given), deadline)
            self._pipe.send(packed({"do": "build"}), deadline)

    def build(self) -> Any:
        """Start it: the facts of the environment, or a `Fault` whose reason may be `REFUSED`."""
        fault = self._built()
        return self._facts if fault is None else fault

    def close(self) -> None:
        """Kill it, with all processes that it has started. It may be asked again."""
        if self._process is None:
            return
        _kill(self._process, self._token)
        self._process.wait()
        self._process, self._is_building = None, False
        self._life += 1
        self._pipe.close()
        self._said.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _built(self) -> Fault | None:
        """Start it if it is not running, and wait until it has its environment."""
        if self._process is None:
            self.begin()
        if not self._is_building:
            return None
        self._facts = self._asked("build", _BUILD_SECONDS)
        self._is_building = False
        if isinstance(self._facts, Fault):
            self.close()
            return self._facts
        return None

    def _start(self) -> None:
        self._token = f"{self._mark}-{uuid.uuid4().hex}"
        self._directory = Path(tempfile.mkdtemp(prefix="surogate-environment-"))
        self._said = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed in `close`
        to_read, answers = os.pipe()
        requests, to_write = os.pipe()
        isolation = "-I" if sys.flags.isolated else "-P"
        command = [sys.executable, isolation, "-m", worker.__name__, str(requests), str(answers), str(os.getpid())]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=(requests, answers),
                env={**os.environ, **threads, TOKEN: self._token, "TMPDIR": str(self._directory)},
                start_new_session=True,
            )
        finally:
            os.close(requests)
            os.close(answers)
        process = self._process
        self._pipe = Pipe(to_read, to_write, alive=lambda: process.poll() is None)

    def _asked(self, do: str, seconds: float, arguments: Mapping[str, Any] | None = None) -> Any:
        """The answer to a request, which is sent before unless `arguments` is None."""
        deadline = time.monotonic() + seconds
        try:
            if arguments is not None:
                self._pipe.send(packed({"do": do, "with": arguments}), deadline)
            answer = self._pipe.receive(deadline)
        except TooLargeError as error:
            return Fault(reason="size", detail=f"the reply has {error}")
        except LateError:
            self.close()
            return Fault(reason="timeout", detail=f"{do} took more than {seconds:g} s")
        except GoneError:
            detail = self._end()
            self.close()
            return Fault(reason="exit", detail=detail)
        if os.fstat(self._said.fileno()).st_size > _SAID:
            os.truncate(self._said.fileno(), 0)
        match answer:
            case {"ok": value}:
                return value
            case {"fault": [str(reason), str(detail)]}:
                return Fault(reason=cast("FaultReason", reason), detail=detail)
        self.close()
        return Fault(reason="exit", detail="the worker process sent no answer")

    def _end(self) -> str:
        """How the process ended, in one line."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll()
        if code is None:
            return "the worker process closed its pipe"
        how = f"exit code {code}" if code >= 0 else _signal_name(-code)
        with contextlib.suppress(OSError):
            self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - 4 * _LINE))
            lines = self._said.read().decode(errors="replace").split("\n")
            last = next((" ".join(line.split()) for line in reversed(lines) if line.strip()), "")
            return f"the worker process ended, {how}" + (f": {last[:_LINE]}" if last else "")
        return f"the worker process ended, {how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill a process, its group, and every process that has inherited its token."""
    for _ in range(_ROUNDS):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        found = marked(token)
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        if not found:
            break
        time.sleep(0.002)
    process.kill()
