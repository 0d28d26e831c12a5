"""The files of an installed distribution, to the byte; nothing is imported.

A digest covers the files that an import would read, wherever they are, and everything that the distribution installed.
So it changes with an altered file, an added file, and a package that precedes the installed one on `sys.path`.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.machinery
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Any

from surogate_core.host import cores
from surogate_core.plugins.discovery import canonical
from surogate_core.plugins.static import locate

BY_INSTALLER = frozenset({"RECORD", "RECORD.jws", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
"""Files of a ``.dist-info`` that record how it was installed, not what was installed."""

MISSING = "missing"
"""In place of the digest of a missing ``RECORD``: files beside the package are unknown then."""

LINK = "link"
"""In place of the digest of a directory that is a symbolic link; before the digest of a file that is one."""

THREADED = 2**22
"""Bytes of a distribution's files from which several threads read them. For a small plugin starting them costs more."""

_SCRIPTS = frozenset({"bin", "Scripts"})
_MODULE_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_IN_ORDER = (
    *importlib.machinery.EXTENSION_SUFFIXES,
    *importlib.machinery.SOURCE_SUFFIXES,
    *importlib.machinery.BYTECODE_SUFFIXES,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFiles:
    """The files that a distribution has installed."""

    elsewhere: bool
    """Whether a package or module of it is imported from outside of the installed files."""
    digests: Mapping[str, str]
    """Path below the directory of installation → SHA-256, `MISSING`, `LINK`, or why the file cannot be read."""


def installed_files(dist: Distribution, modules: Iterable[str] = ()) -> InstalledFiles:
    """The files of a distribution. `modules`: what its entry points name, known also where it has no ``RECORD``."""
    root = Path(str(dist.locate_file(""))).resolve()
    elsewhere = bool(direct_url(dist).get("dir_info", {}).get("editable", False))
    records, problem = _records(dist)
    files: dict[str, Path | str] = {}
    modules = [*modules, *(dist.read_text("top_level.txt") or "").split()] if problem == MISSING else modules
    for unit in {*_units(records), *map(_unit_of, modules)} - {None}:
        assert unit is not None
        found = _imported_from(unit)
        if found is not None:
            elsewhere = elsewhere or not _is_below(found, root, unit)
            files.update(below(found, unit.with_name(found.name)))
    for path in records:
        skipped = path.name in BY_INSTALLER and path.parent.suffix == ".dist-info"
        # The file of an editable install names a directory of this machine.
        if (
            skipped
            or "__pycache__" in path.parts
            or (elsewhere and path.suffix == ".pth")
            or _is_own_script(dist, path)
        ):
            continue
        files.setdefault(path.as_posix(), Path(str(dist.locate_file(path))))
    if problem:
        metadata = _metadata(root, dist)
        files.update((label, file) for label, file in below(metadata, PurePosixPath(metadata.name)))
        files = {label: file for label, file in files.items() if label.rpartition("/")[2] not in BY_INSTALLER}
        files[f"{metadata.name}/RECORD"] = problem
    return InstalledFiles(elsewhere=elsewhere, digests=_digests(files))


def direct_url(dist: Distribution) -> Mapping[str, Any]:
    """The installer's record of a direct URL (PEP 610), or nothing."""
    try:
        text = dist.read_text("direct_url.json")
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError, OSError):
        value = {}
    return value if isinstance(value, dict) else {}


def digest_of(file: Path, *, script: bool = False) -> str:
    """SHA-256 in hexadecimal, or why there is none. `script`: without a first line that names the interpreter."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return "unreadable: not a regular file"
            if script and stream.read(2) == b"#!":
                stream.readline()
            elif script:
                stream.seek(0)
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except IsADirectoryError:
        return "unreadable: not a regular file"
    except (OSError, ValueError) as error:
        return f"unreadable: {getattr(error, 'strerror', None) or error}"


def _records(dist: Distribution) -> tuple[list[PurePosixPath], str]:
    """The lines of ``RECORD``, and why they cannot be read, if so."""
    try:
        if dist.files is None:
            return [], MISSING
        paths = [PurePosixPath(record.as_posix()) for record in dist.files]
    except (ValueError, OSError, csv.Error) as error:
        return [], f"unreadable: {error}"
    return ([], "unreadable: it has a NUL byte") if any("\0" in str(path) for path in paths) else (paths, "")


def _units(records: list[PurePosixPath]) -> Iterator[PurePosixPath]:
    """The outermost packages that are not namespaces, and the modules outside of them, as paths without a suffix."""
    own = [p for p in records if ".." not in p.parts and not p.is_absolute() and p.name.endswith(_MODULE_SUFFIXES)]
    packages = {p.parent for p in own if p.name.partition(".")[0] == "__init__"}
    for path in own:
        outermost = next((parent for parent in reversed(path.parents) if parent in packages), path)
        module = outermost if outermost in packages else outermost.with_name(outermost.name.partition(".")[0])
        if all(part.isidentifier() for part in module.parts):
            yield module


def _unit_of(module: str) -> PurePosixPath | None:
    """The first package on the way to a module that is not a namespace, or the module."""
    parts = module.partition(":")[0].strip().split(".")
    for count in range(1, len(parts) + 1):
        found = _imported_from(PurePosixPath(*parts[:count]))
        if found is not None and (not found.is_dir() or _has_init(found)):
            return PurePosixPath(*parts[:count])
    return None


def _imported_from(unit: PurePosixPath) -> Path | None:
    """The directory or file that an import of ``a/b`` as ``a.b`` reads; None if it is not ours."""
    top, *rest = unit.parts
    if top in sys.stdlib_module_names:
        return None
    found, below = locate(top), top
    for part in rest:
        if found is None:
            return None
        # A namespace is spread over the path.
        places = [found] if _has_init(found) else [Path(entry, below) for entry in sys.path]
        found = next((f for place in places if (f := _module_in(place, part)) is not None), None) or next(
            (place / part for place in places if (place / part).is_dir()), None
        )
        below = f"{below}/{part}"
    return found


def _module_in(directory: Path, name: str) -> Path | None:
    """The file that Python imports there: first a package, then a module, by its suffixes in order."""
    if _has_init(directory / name):
        return directory / name
    files = (directory / f"{name}{suffix}" for suffix in _IN_ORDER)
    return next((file for file in files if file.is_file()), None)


def _has_init(directory: Path) -> bool:
    return any((directory / f"__init__{suffix}").exists() for suffix in _MODULE_SUFFIXES)


def _is_below(found: Path, root: Path, unit: PurePosixPath) -> bool:
    """Whether it is where the distribution has put it; a link in that place is one of its files."""
    # The parent alone is resolved.
    return Path(os.path.realpath(found.parent)) == (root / unit.parent).resolve()


def _is_own_script(dist: Distribution, path: PurePosixPath) -> bool:
    """Whether an installer has made the file from an entry point; each does so in its own way."""
    if ".." not in path.parts or path.parent.name not in _SCRIPTS:
        return False
    names = {e.name for e in dist.entry_points if e.group in ("console_scripts", "gui_scripts")}
    return path.name in names or path.stem.removesuffix("-script") in names


def _metadata(root: Path, dist: Distribution) -> Path:
    """The distribution's ``.dist-info`` directory, whichever way its name is written there."""
    for directory in sorted(root.glob("*.dist-info")):
        name, _, version = directory.name.removesuffix(".dist-info").rpartition("-")
        if canonical(name) == canonical(dist.name) and version == dist.version:
            return directory
    return root / f"{dist.name}-{dist.version}.dist-info"


def below(package: Path, label: PurePosixPath) -> Iterator[tuple[str, Path | str]]:
    """(label, file) of a module, or of everything in a package but the caches of bytecode; links are named."""
    if not package.is_dir():
        yield label.as_posix(), package
        return
    if package.is_symlink():
        yield label.as_posix(), LINK
    seen: set[str] = set()
    for directory, directories, names in os.walk(package, followlinks=True):
        real = os.path.realpath(directory)
        directories[:] = sorted(d for d in directories if d != "__pycache__") if real not in seen else []
        seen.add(real)
        here = label / Path(directory).relative_to(package).as_posix()
        for name in directories:
            if Path(directory, name).is_symlink():
                yield (here / name).as_posix(), LINK
        for name in sorted(names):
            yield (here / name).as_posix(), Path(directory, name)


def _digests(files: Mapping[str, Path | str]) -> dict[str, str]:
    def digest(item: tuple[str, Path | str]) -> tuple[str, str]:
        label, file = item
        if isinstance(file, str):
            return label, file
        parts = PurePosixPath(label).parts
        value = digest_of(file, script=".." in parts and parts[-2] in _SCRIPTS)
        return label, f"{LINK} {value}" if file.is_symlink() else value

    if sum(_size(file) for file in files.values() if isinstance(file, Path)) < THREADED:
        return dict(sorted(map(digest, files.items())))
    # hashlib lets other threads run; a torch with its CUDA libraries is gigabytes.
    with ThreadPoolExecutor(max_workers=min(8, cores())) as pool:
        return dict(sorted(pool.map(digest, files.items(), chunksize=16)))


def _size(file: Path) -> int:
    """Bytes; 0 of a file that cannot be read, whose digest says why."""
    try:
        return file.stat().st_size
    except (OSError, ValueError):
        return 0
