"""A process that outlives a run that is killed, and kills what the run's environments have left.

The kernel ends the workers with the run (`parents.die_with`), but not what they have started: forks that fork again, or
a server. All of them inherit the variable `TOKEN`. This file is run as a script and imports the standard library only,
so the process is small and there at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

TOKEN = "SUROGATE_ENVIRONMENT_WORKER"
"""Variable that marks a worker and every process that it starts; its value begins with the guardian's `mark`."""
_ROUNDS = 500
"""How often processes that fork while they are killed are looked for again."""
_SECONDS = 2.0
"""Between two looks at the parent, whose forks may hold the pipe open when it has ended."""


class Guardian:
    """The process, as its parent has it. It does nothing where the machine has no /proc."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        """The beginning of the tokens that it looks for."""
        self._process: subprocess.Popen[bytes] | None = None
        if Path("/proc/self/environ").exists():
            command = [sys.executable, "-I", "-S", __file__, self.mark, str(os.getpid())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )

    def close(self) -> None:
        """Have it kill what is left, and end."""
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                # A fork of this process may hold the pipe open, so its end alone would not be seen.
                os.write(self._process.stdin.fileno(), b"\n")
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def marked(token: str) -> list[int]:
    """The living processes whose token begins so; empty where that cannot be read."""
    mark, found = f"{TOKEN}={token}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # A process that has ended and was not waited for has no environment.
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def main(mark: str, parent: int) -> None:
    """Wait until the parent closes the pipe or ends, then kill every marked process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # A signal to all processes of a job must not end this one first.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], _SECONDS)[0]:
        pass
    kill_marked(mark)


def kill_marked(mark: str) -> None:
    """Kill every process whose token begins so."""
    for _ in range(_ROUNDS):
        found = marked(mark)
        if not found:
            break
        for number in (signal.SIGSTOP, signal.SIGKILL):  # What is stopped does not fork while others are killed.
            for one in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one, number)
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
