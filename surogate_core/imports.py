"""Importing torch and all that a run needs, without the garbage collector and without what nobody asked for."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def quick_import(name: str, *, keeps: bool = True) -> None:
    """Import a module that imports much, and, where `keeps`, keep what exists then out of the collector's later passes.

    Modules, classes and functions are no garbage, and passes over those of torch took a sixth of their import and a
    tenth of the compilation after it. Of a module that is imported already, nothing changes.
    """
    if name in sys.modules:
        return
    keeps = keeps and not program_keeps_objects()
    if keeps:
        gc.collect()  # garbage would be kept too; there is little before the import
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        if keeps:
            gc.freeze()
            _kept.append(name)
        if enabled:
            gc.enable()


_kept: list[str] = []
"""Modules whose import has kept objects out of the collector's passes."""


def program_keeps_objects() -> bool:
    """Whether the program has itself kept objects out of the collector's passes: they cannot be told from ours."""
    return gc.get_freeze_count() > 0 and not _kept


def put_back_objects() -> None:
    """Let the collector pass over all objects again, if `quick_import` has kept some since the last call."""
    if _kept:
        gc.unfreeze()
        _kept.clear()


class _StandIn(ModuleType):
    """A module that is imported when one of its functions is called. Once it is `ready`, it has what the module has."""

    ready = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = self.__name__
        if self.ready:
            return getattr(importlib.import_module(module), name)
        return lambda *arguments, **named: getattr(importlib.import_module(module), name)(*arguments, **named)


@contextmanager
def imported_when_called(module: str) -> Iterator[None]:
    """Inside, what is taken from a module are functions that import it when they are called.

    For a library that imports another one for functions which this process hardly calls. Nothing changes if the
    module's package is imported already, or is not installed.
    """
    package = module.partition(".")[0]
    spec = None if package in sys.modules else find_spec(package)
    if spec is None:
        yield
        return
    stands_in = {name: _StandIn(name) for name in (package, module)}
    stands_in[module].__spec__ = ModuleSpec(module, None)
    stands_in[package].__spec__ = spec
    if module != package:
        setattr(stands_in[package], module.removeprefix(f"{package}."), stands_in[module])
    sys.modules.update(stands_in)
    try:
        yield
    finally:
        for name, one in stands_in.items():
            one.ready = True
            if sys.modules.get(name) is one:
                del sys.modules[name]


def quick_import_tracing(*, keeps: bool = True) -> None:
    """`quick_import` of what differentiates layers, without NetworkX, by which torch shows and cuts graphs."""
    name = "torch._functorch.aot_autograd"
    if name in sys.modules:
        return
    with suppress(Exception), imported_when_called("networkx"):
        quick_import(name, keeps=keeps)
    quick_import(name, keeps=keeps)


class Distributions(Mapping[str, list[str]]):
    """`importlib.metadata.packages_distributions()`, which reads the files of everything installed only for a package
    whose distribution has another name.
    """

    def __init__(self, whole: Callable[[], Mapping[str, list[str]]]):
        self._whole = whole

    def __getitem__(self, package: str) -> list[str]:
        try:
            own = metadata.distribution(package)
        except (metadata.PackageNotFoundError, ValueError):
            return self._all[package]
        if any(Path(str(own.locate_file(name))).exists() for name in (package, f"{package}.py")):
            return [own.metadata["Name"]]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return self._whole()


@contextmanager
def distributions_when_asked() -> Iterator[None]:
    """Inside, `importlib.metadata.packages_distributions` gives a `Distributions`. transformers asks for all of them
    while it is imported, for the versions of a few: a second where hundreds are installed.
    """
    whole = metadata.packages_distributions
    metadata.packages_distributions = lambda: Distributions(whole)
    try:
        yield
    finally:
        metadata.packages_distributions = whole
