"""Callbacks: plain functions as monitors of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeAlias

from surogate_core import events
from surogate_core.config.yamlfile import KEYWORD
from surogate_core.errors import ConfigError, Problem
from surogate_core.events import Control, Event, RunInfo

Callback: TypeAlias = Callable[[Any], Any]
Callbacks: TypeAlias = Callback | Mapping[str, "Callback | Iterable[Callback]"] | Iterable["Callbacks"]
"""A function of every event, event names with their functions, or several of these."""
Build: TypeAlias = Callable[[RunInfo], "CallbackMonitor"]


class CallbackMonitor:
    """One callback. If it raises, it is disabled with a warning, and the run continues."""

    def __init__(self, call: Callback, event: str | None = None):
        """`event`: the name of the only event that it receives."""
        self._call, self._event = call, event

    def on_event(self, event: Event) -> Control | None:
        """Call the function; what it returns is ignored unless it is a `Control`."""
        if self._event not in (None, event.name):
            return None
        answer = self._call(event)
        return answer if isinstance(answer, Control) else None

    def state(self) -> dict[str, Any]:
        """Nothing: a callback keeps its own state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing to release."""


def built(callbacks: Callbacks) -> dict[str, Build]:
    """Name → what builds each monitor."""
    found: dict[str, Build] = {}
    for call, event in _flat(callbacks):
        name = getattr(call, "__name__", type(call).__name__)
        same = sum(known.partition(" ")[0] == name for known in found)
        monitor = CallbackMonitor(call, event)
        found[f"{name} {same + 1}" if same else name] = partial(_the, monitor)
    return found


def _the(monitor: CallbackMonitor, info: RunInfo) -> CallbackMonitor:
    return monitor


def _flat(callbacks: Any, event: str | None = None) -> Iterator[tuple[Callback, str | None]]:
    if callable(callbacks):
        yield callbacks, event
    elif isinstance(callbacks, Mapping) and event is None:
        for name, calls in callbacks.items():
            if name not in EVENTS:
                near = get_close_matches(str(name), EVENTS, n=1)
                message = f"there is no event {name!r}; known: {', '.join(EVENTS)}."
                raise ConfigError([_problem(message, near[0] if near else "")])
            yield from _flat(calls, name)
    elif isinstance(callbacks, Iterable) and not isinstance(callbacks, str | Mapping):
        for one in callbacks:
            yield from _flat(one, event)
    else:
        raise ConfigError([_problem(f"must be functions; got {callbacks!r:.80}.", "callbacks=[lambda event: …]")])


def _problem(message: str, fix: str) -> Problem:
    return Problem(key="callbacks", message=message, where=KEYWORD, fix=fix)


def _event_names() -> tuple[str, ...]:
    classes = [c for _, c in inspect.getmembers(events, inspect.isclass) if issubclass(c, Event) and c is not Event]
    return tuple(sorted("".join(f"_{c.lower()}" if c.isupper() else c for c in k.__name__)[1:] for k in classes))


EVENTS = _event_names()
"""The names of the events."""
