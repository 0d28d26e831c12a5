"""A process traces equal programs once: tests build the same small models over and over, and tracing is most of it.

A program is shared if everything that its trace may depend on is equal: all that the traced functions close over, by
value; the kernels in use; and nothing but code of this project and of torch is in it. While a test has replaced an
attribute or an item that may be traced (`monkeypatch`, `mock.patch`), its programs are its own.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from surogate_core.dsl import mixers
from surogate_core.dsl.declare import Block
from surogate_core.engine import programs
from surogate_core.kernels import linked, registry
from surogate_core.kernels.building import ahead, native

SHARED = ("differentiate", "with_gradients", "without_gradients", "footprint", "joint_bytes")
"""The functions of `engine.programs` that trace."""
OURS = ("surogate", "torch", "builtins", "functools", "operator", "pathlib")
"""Tops of modules whose code is the same in all tests."""
UNTRACED = (
    *("os", "sys", "time", "signal", "shutil", "subprocess", "threading", "socket", "tests.", "plugins.", "plugin_"),
    *(f"surogate_core.{room}" for room in ("api", "app", "cli", "config", "data", "environments", "files")),
    *(f"surogate_core.{room}" for room in ("generate", "hf", "inference", "launch", "logs", "measure", "plugins")),
    *(f"surogate_core.{room}" for room in ("report", "run", "serve", "setup", "train.loop", "train.signals")),
    *(f"surogate_{kind}" for kind in ("command", "dataset", "environment", "export", "launcher", "monitor", "rollout")),
)
"""Modules whose names and attributes no traced function uses."""
LIMIT = 256
"""Programs that are remembered."""

_Scalars = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_made: dict[Any, tuple[Any, dict[Any, Any], dict[Any, Any]]] = {}
_replaced: set[int] = set()
"""Whoever has replaced an attribute, and has not put it back."""


class _UnlikeError(Exception):
    """Something that cannot be compared by its value."""


class _Same:
    """Equal for one object only, which stays alive."""

    def __init__(self, held: Any):
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def _value(thing: Any, above: tuple[int, ...] = ()) -> Any:
    """Hashable, and equal for things of which the same is traced; raises `_UnlikeError` where that is not known."""
    if isinstance(thing, _Scalars):
        return type(thing), str(thing) if isinstance(thing, float) else thing
    if id(thing) in above:
        raise _UnlikeError(thing)
    within = (*above, id(thing))
    if isinstance(thing, tuple | list):
        return type(thing), tuple(_value(x, within) for x in thing)
    if isinstance(thing, set | frozenset):
        return type(thing), frozenset(_value(x, within) for x in thing)
    if isinstance(thing, Mapping):
        return type(thing), tuple((_value(k, within), _value(v, within)) for k, v in thing.items())
    if isinstance(thing, functools.partial):
        return _value((thing.func, thing.args, thing.keywords), within)
    if isinstance(thing, types.MethodType):
        return _value((thing.__func__, thing.__self__), within)
    _ours(thing if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType) else type(thing))
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        closed = _value((cells, thing.__defaults__, thing.__kwdefaults__), within)
        return thing.__code__, _Same(thing.__globals__), closed
    if isinstance(thing, type | types.BuiltinFunctionType | types.ModuleType) or type(thing) is object:
        return _Same(thing)
    return _object(thing, within)


def _object(thing: Any, within: tuple[int, ...]) -> Any:
    if isinstance(thing, Block):
        return thing.identity
    if isinstance(thing, torch.Tensor) or type(thing).__module__.startswith("torch"):
        raise _UnlikeError(thing)
    if is_dataclass(thing):
        named = {f.name: getattr(thing, f.name) for f in fields(thing)}
    else:
        named = vars(thing)
    return type(thing), _value({**named, **getattr(thing, "__dict__", {})}, within)


def _ours(thing: Any) -> None:
    if (thing.__module__ or "").partition(".")[0].partition("_")[0] not in OURS:
        raise _UnlikeError(thing)


def _surroundings() -> Any:
    """What is in use around the functions."""
    table = registry._active.get()
    kernels = None if table is None else (table.device, table.kernels, table.rewrites, table.packs, table.undefined)
    around = (linked._active.get(), mixers._active.get(), native._assumed.get(), ahead._notes.get())
    state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return _value((kernels, around, state))


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which makes equal programs once."""

    @functools.wraps(make)
    def shared(function: Any, inputs: Any, **options: Any) -> Any:
        table = registry._active.get()
        if _replaced or table is None or options["compiler"] != "fx" or torch.cuda.is_available():
            return make(function, inputs, **options)
        try:
            key = make.__name__, _value(function), tuple(inputs), _value(options), _surroundings()
            hash(key)
        except (_UnlikeError, TypeError, ValueError, AttributeError):
            return make(function, inputs, **options)
        if key not in _made:
            before = table.chosen, table.labels
            table.chosen, table.labels = {}, {}
            try:
                made = make(function, inputs, **options)
            finally:
                chosen, labels = table.chosen, table.labels
                table.chosen, table.labels = before
                table.chosen.update(chosen)
                table.labels.update(labels)
            if len(_made) >= LIMIT:
                del _made[next(iter(_made))]
            _made[key] = made, chosen, labels
            return made
        made, chosen, labels = _made[key]
        table.chosen.update(chosen)
        table.labels.update(labels)
        return made

    return shared


def _noting(begin: Callable[..., Any]) -> Callable[..., Any]:
    """The method that replaces something, noting who has."""

    @functools.wraps(begin)
    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        if _may_be_traced(arguments[0] if arguments else getattr(self, "getter", tuple)()):
            _replaced.add(id(self))
        return begin(self, *arguments, **named)

    return noted


def _may_be_traced(changed: Any) -> bool:
    """Whether a traced function may use what is changed: a module, a class or an object, or its dotted name."""
    if isinstance(changed, str):
        name = changed
    elif isinstance(changed, types.ModuleType):
        name = changed.__name__
    elif isinstance(changed, dict):
        return True
    else:
        name = getattr(changed if isinstance(changed, type) else type(changed), "__module__", "")
    return not name.startswith(UNTRACED)


def _ending(end: Callable[..., Any]) -> Callable[..., Any]:
    """The method that puts back what was replaced."""

    @functools.wraps(end)
    def ended(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return end(self, *arguments, **named)
        finally:
            _replaced.discard(id(self))

    return ended


@contextmanager
def traced_once() -> Iterator[None]:
    """Let all engines of this process share their programs."""
    changes: list[tuple[Any, str, Any]] = [(programs, name, once(getattr(programs, name))) for name in SHARED]
    patches = getattr(mock, "_patch")  # noqa: B009
    begins = [(pytest.MonkeyPatch, n) for n in ("setattr", "delattr", "setitem", "delitem")] + [(patches, "__enter__")]
    changes += [(owner, name, _noting(getattr(owner, name))) for owner, name in begins]
    ends = ((pytest.MonkeyPatch, "undo"), (patches, "__exit__"))
    changes += [(owner, name, _ending(getattr(owner, name))) for owner, name in ends]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, old in before:
            setattr(owner, name, old)
        _made.clear()
