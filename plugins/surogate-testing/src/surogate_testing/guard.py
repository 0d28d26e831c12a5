"""Runs a check: within a time limit, in a child process if its plugin may end the process, with the place of an
error.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import surogate_core
from surogate_core.service.training import TimeUp, time_limit

SECONDS = 600.0
"""Time limit of a check in seconds: many times that of the slowest built-in plugin."""
SECONDS_APART = 60.0
"""The same for a check in a child process, which computes little."""
GRACE = 5.0
"""Seconds for a child process after its time limit, to report where it was."""

_OURS = tuple(Path(module).resolve().parent for module in (surogate_core.__file__, __file__))
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class NotApplicable(Exception):  # noqa: N818 - an outcome, not an error
    """The check does not apply to this bundle on this machine; the message is the reason."""


class CheckFailedError(AssertionError):
    """The requirement is not met."""

    def __init__(self, message: str, trace: str = ""):
        super().__init__(message)
        self.trace = trace
        """The traceback as text; empty if the kit itself found the fault."""


class _Exits(BaseException):
    """The plugin called `os._exit`."""


def guarded(call: Callable[[], None], *, seconds: float, package: Path | None = None, apart: bool = False) -> None:
    """Run a check; raises `CheckFailedError` with what is wrong and where, or `NotApplicable` with the reason.

    `package`: the plugin's module file or package directory; the place of an error is its last line there. `apart`: run
    in a child process, so that a plugin that ends or blocks the process fails its check and nothing else.
    """
    if apart and hasattr(os, "fork"):
        _apart(call, seconds, package)
    else:
        _here(call, seconds, package)


def _here(call: Callable[[], None], seconds: float, package: Path | None) -> None:
    leave, os._exit = os._exit, _refuse_exit
    try:
        with time_limit(seconds):
            call()
    except (NotApplicable, CheckFailedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise CheckFailedError(_message(error, seconds, package), traceback_of(error)) from error
    finally:
        os._exit = leave


def _refuse_exit(status: int) -> NoReturn:
    raise _Exits(f"os._exit({status})")


def _message(error: BaseException, seconds: float, package: Path | None) -> str:
    place = place_of(error.__traceback__, package)
    at = f" (at {place})" if place else ""
    if isinstance(error, TimeUp):
        return f"it is not done after {seconds:g} s: it hangs, or is far too slow{at}"
    text = " ".join(str(error).split())
    if isinstance(error, _Exits):
        return f"it ends the process by {text}{at}"
    if isinstance(error, SystemExit):
        return f"it ends the process by SystemExit({text}){at}"
    if isinstance(error, AssertionError):
        return f"{text or 'an assertion does not hold'}{at}"
    return f"{type(error).__name__}: {text}{at}" if text else f"{type(error).__name__}{at}"


def place_of(trace: TracebackType | None, package: Path | None) -> str:
    """``file:line`` of the plugin's last line in a traceback, or an empty text.

    Without a package, that of the last line outside of the core and of libraries.
    """
    found = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if _is_plugins(file, package):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_plugins(file: Path, package: Path | None) -> bool:
    if not file.is_absolute():
        return False  # made by a compiler or by `exec`
    file = file.resolve()
    if package is not None:
        return file == package.resolve() or package.resolve() in file.parents
    return not any(place in file.parents for place in (*_OURS, *_LIBRARIES))


def traceback_of(error: BaseException) -> str:
    """The traceback as text; empty for a fault that the kit itself found, because its lines are not informative."""
    own = isinstance(error, AssertionError) and not place_of(error.__traceback__, None)
    return "" if own else "".join(traceback.format_exception(error))


# ---------------------------------------------------------------------- in a child process


def _apart(call: Callable[[], None], seconds: float, package: Path | None) -> None:
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The child uses no lock that another thread of this process could hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(read)
        _in_child(call, seconds, package, write)
    os.close(write)
    try:
        answer = _answer(read, seconds + GRACE)
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if answer is None:
        raise CheckFailedError(f"it is not done after {seconds:g} s, and does not let itself be interrupted")
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        how = f"by {signal.Signals(-code).name}" if code < 0 and code != -signal.SIGKILL else "on its own"
        raise CheckFailedError(f"it ends the process {how}: the check was cut off")
    outcome = json.loads(answer)
    if outcome["is"] == "skipped":
        raise NotApplicable(outcome["text"])
    if outcome["is"] == "failed":
        raise CheckFailedError(outcome["text"], outcome["trace"])


def _in_child(call: Callable[[], None], seconds: float, package: Path | None, write: int) -> NoReturn:
    leave = os._exit
    outcome: dict[str, Any] = {"is": "held"}
    try:
        os.setsid()
        try:
            _here(call, seconds, package)
        except NotApplicable as reason:
            outcome = {"is": "skipped", "text": str(reason)}
        except BaseException as error:
            text = str(error) or type(error).__name__
            outcome = {"is": "failed", "text": text, "trace": getattr(error, "trace", "")}
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(outcome) + "\n")
    finally:
        leave(0)


def _answer(read: int, seconds: float) -> bytes | None:
    """The line that the child writes; empty if it ended without one, None if it exceeded its time limit."""
    until = time.monotonic() + seconds
    found = b""
    while not found.endswith(b"\n"):
        ready, _, _ = select.select([read], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        part = os.read(read, 1 << 16)
        if not part:
            return b""
        found += part
    return found


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of a plugin inside begin with the requested operation; the original error keeps its place."""
    try:
        yield
    except (NotApplicable, AssertionError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise AssertionError(f"{what}: {type(error).__name__}: {text}").with_traceback(error.__traceback__) from error
