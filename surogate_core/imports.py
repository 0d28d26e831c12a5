"""Importing torch and all that a run needs, without the garbage collector and without what nobody asked for."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def quick_import(name: str) -> None:
    """Import a module that imports much, and keep what exists then out of the collector's later passes.

    Modules, classes and functions are no garbage, and passes over those of torch took a sixth of their import and a
    tenth of the compilation after it. Of a module that is imported already, nothing changes.
    """
    if name in sys.modules:
        return
    # Garbage would be kept too; there is little before the import.
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        _kept.append(name)
        if enabled:
            gc.enable()


_kept: list[str] = []
"""Modules whose import has kept objects out of the collector's passes."""


def put_back_objects() -> None:
    """Let the collector pass over all objects again, if `quick_import` has kept some since the last call."""
    if _kept:
        gc.unfreeze()
        _kept.clear()


@contextmanager
def imported_when_called(module: str, function: str) -> Iterator[None]:
    """Inside, ``from module import function`` gives a function that imports the module when it is called.

    For a library that imports another one for a function which this process hardly calls. `module` is one of a package.
    Nothing changes if the package is imported already, or is not installed.
    """
    package = module.partition(".")[0]
    spec = None if package in sys.modules else find_spec(package)
    if spec is None:
        yield
        return
    whole, part = ModuleType(package), ModuleType(module)
    whole.__spec__, part.__spec__ = spec, ModuleSpec(module, None)
    setattr(part, function, _when_called(module, function))
    stands_in = {package: whole, module: part}
    sys.modules.update(stands_in)
    try:
        yield
    finally:
        for name, one in stands_in.items():
            if sys.modules.get(name) is one:
                del sys.modules[name]


def _when_called(module: str, function: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*arguments, **named)

    return call


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
