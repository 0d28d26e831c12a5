"""Progress of a command on standard error: bars on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

    from surogate_core.events import Progress

PROGRESS_SECONDS = 5.0
"""Time between two lines about one stage where there is no terminal; a shorter stage has none."""


@contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """Takes progress events: bars on a terminal, now and then a line elsewhere; standard output stays free."""
    if sys.stderr.isatty():
        with _bars() as take:
            yield take
    else:
        yield _Lines().take


@contextmanager
def _bars() -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    figures = TextColumn("{task.fields[figures]}", markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), figures)
    clock = _Clock()
    shown: dict[str, TaskID] = {}
    with Bars(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bars:
        # A process that is killed cannot bring a hidden cursor back.
        bars.console.show_cursor(True)

        def take(event: Progress) -> None:
            seconds = clock.seconds(event)
            if event.task not in shown:
                shown[event.task] = bars.add_task(event.task, total=None, figures="")
            bars.update(
                shown[event.task],
                completed=event.done,
                total=event.total or None,
                figures=_figures(event, seconds),
                visible=not _finished(event),
            )

        yield take


class _Lines:
    def __init__(self) -> None:
        self._clock = _Clock()
        self._last: dict[str, float] = {}
        """Seconds of each stage at its last line."""
        self._first: dict[str, tuple[float, int]] = {}
        """(seconds, what was done) at the first event of each stage, before which other work may have run."""

    def take(self, event: Progress) -> None:
        seconds = self._clock.seconds(event)
        begun, known = self._first.setdefault(event.task, (seconds, event.done))
        if _finished(event):
            del self._first[event.task]
        last = self._last.pop(event.task, None) if _finished(event) else self._last.get(event.task)
        # A stage that has had a line has one at its end too.
        if seconds - (last or 0.0) < PROGRESS_SECONDS and not (_finished(event) and last is not None):
            return
        if not _finished(event):
            self._last[event.task] = seconds
        left = ""
        if known < event.done < event.total:
            left = f", {(seconds - begun) * (event.total - event.done) / (event.done - known):.0f} s to go"
        print(f"{event.task}: {_figures(event, seconds)}{left}", file=sys.stderr, flush=True)


class _Clock:
    """How long each stage takes. It begins where the last one ended: its first event comes when some of it is done."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._began: dict[str, float] = {}

    def seconds(self, event: Progress) -> float:
        """Since the event's stage began."""
        now = time.monotonic()
        began = self._began.setdefault(event.task, self._last)
        self._last = now
        if _finished(event):  # another stage may have the same name
            del self._began[event.task]
        return now - began


def _finished(event: Progress) -> bool:
    return 0 < event.total <= event.done


def _figures(event: Progress, seconds: float) -> str:
    of = f" of {event.total:,}" if event.total else ""
    speed = event.done / seconds if seconds > 0 else 0.0
    rate = f", {speed:,.0f}/s" if speed >= 10 else f", {speed:.1f}/s" if speed else ""
    return f"{event.done:,}{of} {event.unit}{rate}"
