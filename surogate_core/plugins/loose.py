"""Loose modules: files that can be imported and that no installed distribution has, and what keeps them out.

A library imports optional packages by their names, so a file ``redis.py`` on `sys.path` runs in its place. A lock of
the scope ``environment`` names the loose modules that there are, and no other is imported under it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, all_suffixes
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from surogate_core.errors import PluginError
from surogate_core.plugins.digests import below, digest_of, direct_url

_SUFFIXES = tuple(all_suffixes())
_MOST = 100_000
"""Entries of directories without an ``__init__`` that are looked at; an import from the others is still refused."""


class LooseModuleError(PluginError, ImportError):
    """Something imports a module that is in no locked distribution."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(
            f"module {spec.name} ({spec.origin}) is in no distribution of the plugin lock, whose scope is environment, "
            "so it is not imported. Fix: remove it from sys.path (PYTHONPATH, the working directory, site-packages), "
            "or review it and write a new lock: surogate plugins lock --scope environment"
        )
        self.name, self.path = spec.name, spec.origin


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportableFiles:
    """Files that may be imported."""

    files: frozenset[str]
    """Resolved paths."""
    directories: tuple[str, ...]
    """Resolved paths below which everything may: an editable install, a loose package that is locked."""

    def has(self, file: str) -> bool:
        """Whether a file is one of these, or Python's own."""
        path = _resolved(file)
        return path in self.files or _is_pythons(path) or any(_is_below(path, d) for d in self.directories)

    def joined(self, places: Iterable[str]) -> ImportableFiles:
        """With further files and directories."""
        real = sorted(map(os.path.realpath, places))
        files = self.files | {place for place in real if not Path(place).is_dir()}
        return ImportableFiles(
            files=files, directories=(*self.directories, *(place for place in real if Path(place).is_dir()))
        )


def owned_by(files: Mapping[str, Iterable[str]]) -> ImportableFiles:
    """The files of distributions. `files`: name of each → the paths of its files below where it is installed."""
    found: set[str] = set()
    directories: set[str] = set()
    for name, paths in files.items():
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue
        root = os.path.realpath(str(dist.locate_file("")))
        found.update(f"{root}{os.sep}{path}" for path in paths if not path.startswith("../"))
        directories.update(_editable_directories(dist))
    return ImportableFiles(files=frozenset(found), directories=tuple(sorted(directories)))


def _editable_directories(dist: Distribution) -> Iterator[str]:
    """The directories that an editable install adds to `sys.path`, and that of its project."""
    facts = direct_url(dist)
    if not facts.get("dir_info", {}).get("editable", False):
        return
    yield os.path.realpath(unquote(urlsplit(str(facts.get("url", ""))).path))
    for record in dist.files or ():
        if record.suffix == ".pth" and len(record.parts) == 1:
            lines = Path(str(dist.locate_file(record))).read_text(encoding="utf-8").splitlines()
            yield from (os.path.realpath(line) for line in lines if Path(line).is_dir())


# ------------------------------------------------------------------------------- what there is


def loose_modules(owned: ImportableFiles) -> dict[str, str]:
    """Text of a lock → file or directory of each loose module on `sys.path`, apart from a script's own directory."""
    found = {}
    own = _own_directory()
    for entry in dict.fromkeys(os.path.realpath(entry) for entry in sys.path):
        if entry in own or _is_pythons(f"{entry}{os.sep}x"):
            continue
        for name, place in _units(entry, "", [_MOST]):
            init = next((str(file) for file in _inits(place) if file.exists()), place)
            if not owned.has(init):
                found[f"loose module {name} in {entry}, SHA-256 {_digest(Path(place))}"] = place
    return dict(sorted(found.items()))


def _units(directory: str, prefix: str, left: list[int]) -> Iterator[tuple[str, str]]:
    """(dotted name, file or directory) of the modules and packages; those of a namespace one by one."""
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:  # no directory: an archive, which Python can import from, is a loose module as a whole
        if Path(directory).is_file():
            yield Path(directory).name, directory
        return
    for entry in entries:
        left[0] -= 1
        name = entry.name.partition(".")[0]
        if left[0] < 0:
            return
        if not name.isidentifier() or name == "__pycache__":
            continue
        if entry.name.endswith(_SUFFIXES) and entry.is_file():
            yield prefix + name, entry.path
        elif entry.name == name and entry.is_dir():
            if any(file.exists() for file in _inits(entry.path)):
                yield prefix + name, entry.path
            else:
                yield from _units(entry.path, f"{prefix}{name}.", left)


def _inits(package: str) -> Iterator[Path]:
    return (Path(package, f"__init__{suffix}") for suffix in _SUFFIXES)


def _digest(place: Path) -> str:
    if not place.is_dir():
        return digest_of(place)
    files = below(place, PurePosixPath(place.name))
    lines = sorted(f"{digest_of(f) if isinstance(f, Path) else f}  {label}\n" for label, f in files)
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _own_directory() -> tuple[str, ...]:
    """The directory from which Python was started to import: of the script, or the working directory after ``-m``."""
    main = sys.modules.get("__main__")
    if sys.flags.safe_path or main is None:
        return ()
    file = getattr(main, "__file__", None)
    by_name = getattr(main, "__spec__", None) is not None or file is None
    return (os.path.realpath(Path.cwd() if by_name or file is None else Path(file).parent),)


def _scripts_directory() -> tuple[str, ...]:
    """The directory of a user's own script, which imports what is beside it; empty for the command of Surogate."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None or file is None:
        return ()
    directory = os.path.realpath(Path(file).parent)
    return () if directory == os.path.realpath(sysconfig.get_path("scripts")) else (directory,)


# ------------------------------------------------------------------------------- imports


class _Gate:
    """A finder before all others, which asks them and refuses what is not owned."""

    def __init__(self, owned: ImportableFiles) -> None:
        self.owned = owned
        self._own = _scripts_directory()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find: Any = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                self._check(spec)
                return spec
        return None

    def _check(self, spec: ModuleSpec) -> None:
        # A namespace has no code, and what another finder makes without a file is that finder's.
        if not spec.has_location or spec.origin is None or self.owned.has(spec.origin):
            return
        if not any(_is_below(_resolved(spec.origin), directory) for directory in self._own):
            raise LooseModuleError(spec)


def refuse_loose(owned: ImportableFiles) -> None:
    """From now on refuse the import of every module that is not owned."""
    for finder in sys.meta_path:
        if isinstance(finder, _Gate):
            finder.owned = owned
            return
    sys.meta_path.insert(0, _Gate(owned))


def allow_loose() -> None:
    """Take the refusal back."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Gate)]


# ------------------------------------------------------------------------------- paths


def _resolved(file: str) -> str:
    directory, name = os.path.split(file)
    return f"{_real(directory)}{os.sep}{name}"


@cache
def _real(directory: str) -> str:
    return os.path.realpath(directory)


@cache
def _python() -> tuple[str, ...]:
    """Directories of the standard library, and the archive of it."""
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    archive = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return tuple(sorted({os.path.realpath(p) for p in paths} | {p for p in sys.path if Path(p).name == archive}))


def _is_pythons(path: str) -> bool:
    for directory in _python():
        if _is_below(path, directory):
            return path[len(directory) + 1 :].partition(os.sep)[0] not in ("site-packages", "dist-packages")
    return False


def _is_below(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip(os.sep) + os.sep)
