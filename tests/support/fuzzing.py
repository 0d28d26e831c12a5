"""What the tests of tests/fuzz share: drawing cases, the oracle of each, and the count at the end.

A case is a function that either succeeds or raises a `SurogateError` with one readable message. Anything else is a
failure: another exception, more than 10 s, a message that cannot be printed, a file written outside the case's
directory. Failures are counted by kind, and the first case of each kind is shown, so that it can be repeated.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from surogate_core.data.encoded import RowError
from surogate_core.errors import SurogateError

HANG_SECONDS = 10
BATCH = 50
"""Cases that are drawn together: hypothesis varies what it has drawn before, new beginnings keep the cases apart."""
LONGEST_PROBLEM = 4000
LONGEST_MESSAGE = 60_000
"""A configuration may have many mistakes, each at most `LONGEST_PROBLEM` long."""


def numbers(few: int, more: int, many: int) -> list[Any]:
    """How many cases `make test`, `make test-slow` and `make test-fuzz` draw, as parameters of a test."""
    return [few, pytest.param(more, marks=pytest.mark.slow), pytest.param(many, marks=pytest.mark.fuzz)]


class Hang(BaseException):
    """A case takes too long; no `except Exception` may swallow it."""


class WrongError(AssertionError):
    """The findings of a case's oracle."""


@dataclass
class Counts:
    """The outcomes, by kind of case."""

    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    """What is wrong, in short → (how often, the first such case)."""

    @property
    def cases(self) -> int:
        """All of them."""
        return self.accepted.total() + self.refused.total() + sum(times for times, _ in self.failures.values())

    def check(self, number: int, *, least_accepted: float, least_refused: float) -> None:
        """Print the counts; fail on any failure, or where the cases say little. The shares are of all cases."""
        kinds = sorted({*self.accepted, *self.refused})
        lines = [f"  {kind:<32} {self.accepted[kind]:>6,} accepted {self.refused[kind]:>6,} refused" for kind in kinds]
        lines.append(f"{self.cases:,} cases: {self.accepted.total():,} accepted, {self.refused.total():,} refused")
        sys.stdout.write("\n".join(["", *lines, ""]))
        shown = "\n\n".join(f"{times} times: {what}\n{first}" for what, (times, first) in self.failures.items())
        assert not self.failures, shown
        assert self.cases >= number
        assert self.accepted.total() >= least_accepted * number, "the cases are too broken to say much"
        assert self.refused.total() >= least_refused * number, "the cases are too tame to say much"


def fuzz(cases: SearchStrategy[Any], run: Callable[[Any, Path], None], number: int, *, start: int) -> Counts:
    """Draw `number` cases, the same for the same `start`, and run each in an empty directory of its own.

    Cases are counted under their attribute `kind`. `run` may raise `SurogateError`, `RowError`, or `WrongError` for
    what its own oracle finds.
    """
    counts = Counts()
    with written_files_watched() as watch:
        for first in range(0, number, BATCH):
            options: dict[str, Any] = {"database": None, "deadline": None, "phases": [Phase.generate]}
            options |= {"suppress_health_check": list(HealthCheck), "derandomize": False}

            @seed(start * 1_000_003 + first)
            @settings(max_examples=min(BATCH, number - first), **options)
            @given(cases)
            def one(case: Any) -> None:
                _run(case, run, counts, watch)

            one()
    return counts


def _run(case: Any, run: Callable[[Any, Path], None], counts: Counts, watch: WriteWatch) -> None:
    kind = str(getattr(case, "kind", "case"))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        directory = Path(name).resolve()
        before = Path.cwd()
        os.chdir(directory)
        wrong, detail, refused = "", "", False
        try:
            with watch.only(directory), time_limit():
                run(case, directory)
        except RowError as error:  # its text is escaped where the row's place is put before it
            refused = True
            wrong, detail = "" if str(error).strip() else "the message is empty", repr(error)
        except SurogateError as error:
            refused = True
            wrong, detail = complaint(error), str(error)[:1500]
        except WrongError as error:
            wrong = str(error)
        except (Exception, Hang) as error:
            wrong, detail = place_of(error), "".join(traceback.format_exception(error)[-8:])
        finally:
            os.chdir(before)
        if not wrong and watch.outside:
            wrong = f"written outside its directory: {watch.outside[0]}"
    if not wrong:
        (counts.refused if refused else counts.accepted)[kind] += 1
        return
    key = f"{wrong.splitlines()[0]} ({kind})"
    times, first = counts.failures.get(key, (0, f"{shown(case)}\n{wrong}\n{detail}"))
    counts.failures[key] = times + 1, first


def shown(case: Any) -> str:
    """The case, so that it can be made again; long repetitions are named by their length."""
    return re.sub(r"((?:\\x..|.){1,6}?)\1{40,}", lambda m: f"{m[1]}…({len(m[0])} characters)…", repr(case))


def place_of(error: BaseException) -> str:
    """The exception and the function of ours that it came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "surogate_" in f.filename] or frames
    return f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].name}"


def complaint(error: SurogateError) -> str:
    """The fault of a refusal; empty if there is none."""
    lines = str(error).split("\n")
    for line in lines:
        if not line.isprintable():
            odd = sorted({repr(c) for c in line if not c.isprintable()})
            return f"the message has unprintable characters {', '.join(odd[:5])}"
    if not str(error).strip():
        return "the message is empty"
    if max(map(len, lines)) > LONGEST_PROBLEM or len(str(error)) > LONGEST_MESSAGE:
        return "the message is very long"
    if "Traceback (most recent call last)" in str(error):
        return "the message holds a traceback"
    return ""


def needs_fix(error: SurogateError) -> str:
    """A complaint where nothing of the message says what to do."""
    return "" if re.search(r"Fix: |\bset |\bknown|did you mean", str(error)) else "the message has no fix"


# ------------------------------------------------------------------------------------ limits


def _late(number: int, frame: FrameType | None) -> None:
    raise Hang(f"no answer in {HANG_SECONDS} s")


@contextmanager
def time_limit(seconds: int = HANG_SECONDS) -> Iterator[None]:
    """Raise `Hang` inside a block that takes longer on the processor; for the main thread of a system with alarms.

    The processor's time is counted, so that other work of the machine makes no case fail.
    """
    before = signal.signal(signal.SIGPROF, _late), signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(4 * seconds)  # one that waits uses no processor
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


class WriteWatch:
    """Notes what Python code opens to write, makes, renames or removes outside a directory, while one is named."""

    def __init__(self) -> None:
        self.outside: list[str] = []
        self._directory: str | None = None
        sys.addaudithook(self._hook)

    @contextmanager
    def only(self, directory: Path) -> Iterator[None]:
        """Watch a block that may write in `directory` alone."""
        self.outside = []
        self._directory = f"{directory}{os.sep}"
        try:
            yield
        finally:
            self._directory = None

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._directory is None:
            return
        if event == "open":
            path, _, flags = arguments
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return
            paths = [path]
        elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"):
            paths = list(arguments[:1])
        elif event in ("os.rename", "os.link", "os.symlink"):
            paths = list(arguments[:2]) if event == "os.rename" else [arguments[1]]
        else:
            return
        for path in paths:
            if isinstance(path, int):
                continue
            place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100  # Path() would follow links
            if not place.startswith(self._directory) and place != self._directory[:-1] and place != os.devnull:
                self.outside.append(f"{event} {place}")


_WATCH: list[WriteWatch] = []


@contextmanager
def written_files_watched() -> Iterator[WriteWatch]:
    """The watch of this process; an audit hook cannot be taken off again. No byte code is written meanwhile."""
    if not _WATCH:
        _WATCH.append(WriteWatch())
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield _WATCH[0]
    finally:
        sys.dont_write_bytecode = before
