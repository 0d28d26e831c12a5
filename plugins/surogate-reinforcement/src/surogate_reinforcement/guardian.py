"""A process between the run and a worker: it ends the worker with all that it has started, also if the run is killed.

The kernel ends a worker with its parent (`parents.die_with`), but not what the worker has started: forks that fork
again, or a server in a session and an environment of its own. The guardian is their subreaper (``prctl(2)``), so each
of them that loses its parent becomes the guardian's child and is found below it. It also drains the worker's stderr,
and removes its directory for temporary files. This file is run as a script and imports the standard library only, so
the process is small and there at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

TOKEN = "SUROGATE_ENVIRONMENT_WORKER"
"""Variable that marks a worker and what inherits its environment, in case that the guardian itself is killed."""
PREFIX = "surogate-environment-"
"""Beginning of the names of the directories."""
PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 500
"""How often processes that fork while they are killed are looked for again."""
_SECONDS = 2.0
"""Between two looks at the parent, whose forks may hold the pipe open when it has ended."""
_KEPT = 4096
"""Last bytes of stderr that are kept."""
_PART = 1 << 20
"""Bytes of stderr that are read at once."""
_YOUNG = 60.0
"""Seconds in which a directory may not have its lock yet."""
_PATIENCE = 10.0
"""Seconds that a guardian has to kill what it guards; then it is killed itself."""


class Guardian:
    """The process, as the run has it."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], environment: Mapping[str, str]) -> None:
        """Start a guardian, which starts `command` with its own process id as the last argument."""
        self._token = environment[TOKEN]
        fds = ",".join(map(str, pass_fds))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), fds, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=pass_fds,
            env=environment,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def ended(self, seconds: float) -> tuple[int | None, str]:
        """The worker's exit code, as `subprocess` has it, and the end of its stderr, if it ends by itself by then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            assert self._process.stdout is not None
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = json.loads(self._process.stdout.read())
                return found["code"], found["said"]
            return self._process.returncode, ""
        return None, ""

    def close(self) -> None:
        """Have it kill the worker and what that has started, and end."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            # A fork of this process may hold the pipe open, so its end alone would not be seen.
            os.write(process.stdin.fileno(), b"\n")
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
        if process.poll() != 0:
            process.kill()
            process.wait()
            kill_all(lambda: marked(self._token))
        process.stdout.close()


def marked(token: str) -> list[int]:
    """The living processes that have inherited a token; empty where that cannot be read."""
    mark, found = f"{TOKEN}={token}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # A process that has ended and was not waited for has no environment.
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def descendants(root: int) -> list[int]:
    """The processes below one, those that have ended and were not waited for too; empty where there is no /proc."""
    below: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parent = int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
            below.setdefault(parent, []).append(int(process.name))
    found = list(below.get(root, ()))
    for one in found:
        found += below.get(one, ())
    return found


def kill_all(find: Callable[[], Sequence[int]]) -> None:
    """Kill the processes that a function finds, until it finds none."""
    for _ in range(_ROUNDS):
        found = find()
        if not found:
            break
        for number in (signal.SIGSTOP, signal.SIGKILL):  # What is stopped does not fork while others are killed.
            for one in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(one, number)
        time.sleep(0.002)


# ------------------------------------------------------------------------------- the process


def main(parent: int, fds: Sequence[int], command: Sequence[str]) -> None:
    """Start the command and guard it until it ends, or the parent asks for its end or has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal to all processes of a job must not end this one first. A handler is not inherited.
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    directory, lock = _own_directory()
    waking, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    errors, writing = os.pipe()
    os.set_blocking(errors, False)
    worker = subprocess.Popen(
        [*command, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=writing,
        pass_fds=fds,
        env={**os.environ, "TMPDIR": directory},
        start_new_session=True,
    )
    for end in (writing, *fds):
        os.close(end)
    try:
        code, said = _guarded(worker.pid, parent, waking, errors)
        with contextlib.suppress(OSError):
            os.write(1, json.dumps({"code": code, "said": said.decode(errors="replace")}).encode())
            os.close(1)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
    remove_leftovers()


def _guarded(worker: int, parent: int, waking: int, errors: int) -> tuple[int | None, bytes]:
    """The code of a worker that has ended by itself, and the last of what was written to its stderr."""
    code: int | None = None
    said = b""
    reading = [0, waking, errors]
    while code is None and os.getppid() == parent:
        ready = select.select(reading, [], [], _SECONDS)[0]
        if errors in ready:
            part = os.read(errors, _PART)
            said = (said + part)[-_KEPT:]
            if not part:  # It was closed.
                reading.remove(errors)
        if waking in ready:
            os.read(waking, 1024)
            code = _reaped(worker)
        if 0 in ready:
            break

    def left() -> list[int]:
        _reaped(worker)
        return descendants(os.getpid())

    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
    kill_all(left)
    with contextlib.suppress(BlockingIOError):
        while part := os.read(errors, _PART):
            said = (said + part)[-_KEPT:]
    return code, said


def _reaped(worker: int) -> int | None:
    """Wait for every child that has ended; the worker's code if it is one of them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _own_directory() -> tuple[str, int]:
    """A new directory, and the descriptor that holds its lock, by which others see that it is in use."""
    directory = tempfile.mkdtemp(prefix=PREFIX)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # of a file system without locks
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return directory, lock


def remove_leftovers() -> None:
    """Remove this user's directories whose guardian was killed, or that a machine had when it lost its power."""
    import fcntl

    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(lock)
                if status.st_uid == os.geteuid() and time.time() - status.st_ctime > _YOUNG:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(fd) for fd in sys.argv[2].split(",") if fd], sys.argv[3:])
