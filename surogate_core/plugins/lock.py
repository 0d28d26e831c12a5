"""The plugin lock: what is installed, to the byte, written to a file and compared with it; nothing is imported.

A digest is taken over the files that an import would read, wherever they are, so that an altered file, an added one,
and a package that stands before the installed one on `sys.path` all show.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path, PurePosixPath
from typing import Any

from surogate_core.errors import UserError
from surogate_core.plugins.discovery import InstalledPlugin, canonical
from surogate_core.plugins.static import locate

VERSION = 1
"""Version of the file's format."""

_BY_INSTALLER = frozenset({"RECORD", "RECORD.jws", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})
"""Files of a ``.dist-info`` that say how it was installed, not what was."""

MISSING = "missing"
"""Stands for the digest of a ``RECORD`` that is not there: files beside the package are not known then."""

_SHOWN = 3
"""Altered files that a difference names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDistribution:
    """One distribution that has plugins."""

    name: str
    """Normalised (PEP 503)."""
    version: str
    entry_points: Mapping[str, str]
    """Entry point of group ``surogate`` → module."""
    editable: bool
    """Whether the modules are outside of the installed files: an editable install, or another package before it."""
    files: Mapping[str, str]
    """Path below the directory of installation → SHA-256 of the file, in hexadecimal."""
    wheel_sha256: str = ""
    """SHA-256 of the wheel that it was installed from, where the installer has recorded it."""

    @property
    def sha256(self) -> str:
        """SHA-256 over names and digests of all files, as ``sha256sum`` would list them."""
        lines = "".join(f"{digest}  {path}\n" for path, digest in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A set of distributions with plugins, for one version of the core."""

    core: str
    api: int
    distributions: Mapping[str, LockedDistribution]


# ------------------------------------------------------------------------------- what is installed


def installed_lock(plugins: Iterable[InstalledPlugin]) -> Lock:
    """The lock of these plugins, as they are installed now."""
    from surogate_core import API_VERSION, __version__

    groups: dict[str, list[InstalledPlugin]] = {}
    for plugin in plugins:
        groups.setdefault(canonical(plugin.distribution), []).append(plugin)
    found = {name: _distribution(name, members) for name, members in sorted(groups.items())}
    return Lock(core=__version__, api=API_VERSION, distributions=found)


def _distribution(name: str, plugins: Sequence[InstalledPlugin]) -> LockedDistribution:
    entry_point = plugins[0].entry_point
    dist = entry_point.dist if entry_point is not None else None
    assert dist is not None, "only installed plugins are locked"
    root = Path(str(dist.locate_file(""))).resolve()
    origin = _direct_url(dist)
    editable = bool(origin.get("dir_info", {}).get("editable", False))
    files: dict[str, Path] = {}
    for plugin in plugins:
        for package in _packages(plugin.module):
            # Not resolved: a link inside of the directory of installation is one of its files.
            editable = editable or not Path(os.path.abspath(package)).is_relative_to(root)  # noqa: PTH100
            files.update(_below(package))
    for record in dist.files or ():
        path = PurePosixPath(record.as_posix())
        skipped = path.name in _BY_INSTALLER and path.parent.suffix == ".dist-info"
        # What an editable install puts there names a directory of this machine; scripts name its interpreter.
        if skipped or ".." in path.parts or "__pycache__" in path.parts or (editable and path.suffix == ".pth"):
            continue
        files.setdefault(path.as_posix(), Path(str(dist.locate_file(record))))
    digests = {}
    if dist.files is None:
        metadata = _metadata(root, dist)
        files.update((label, file) for label, file in _below(metadata) if file.name not in _BY_INSTALLER)
        digests[f"{metadata.name}/RECORD"] = MISSING
    digests.update((label, _digest(file)) for label, file in files.items())
    return LockedDistribution(
        name=name,
        version=plugins[0].version,
        entry_points={p.name: p.module for p in sorted(plugins, key=lambda p: p.name)},
        editable=editable,
        files=dict(sorted(digests.items())),
        wheel_sha256=str(origin.get("archive_info", {}).get("hashes", {}).get("sha256", "")),
    )


def _metadata(root: Path, dist: Distribution) -> Path:
    """The distribution's ``.dist-info`` directory, whichever way its name is written there."""
    for directory in sorted(root.glob("*.dist-info")):
        name, _, version = directory.name.removesuffix(".dist-info").rpartition("-")
        if canonical(name) == canonical(dist.name) and version == dist.version:
            return directory
    return root / f"{dist.name}-{dist.version}.dist-info"


def _packages(module: str) -> Iterator[Path]:
    """The directory or file that an import of the module reads, of its first package that is not a namespace."""
    top, *rest = module.partition(":")[0].strip().split(".")
    found = locate(top)
    while found is not None and found.is_dir() and not (found / "__init__.py").is_file() and rest:
        below = found / rest.pop(0)
        found = next((p for p in (below, below.with_suffix(".py")) if p.exists()), None)
    if found is not None:
        yield found


def _below(package: Path) -> Iterator[tuple[str, Path]]:
    """(label, file) of a module, or of everything in a package but the caches of bytecode."""
    if not package.is_dir():
        yield package.name, package
        return
    seen: set[str] = set()
    for directory, directories, names in os.walk(package, followlinks=True):
        real = os.path.realpath(directory)
        directories[:] = sorted(d for d in directories if d != "__pycache__") if real not in seen else []
        seen.add(real)
        for name in sorted(names):
            file = Path(directory, name)
            yield f"{package.name}/{file.relative_to(package).as_posix()}", file


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _direct_url(dist: Distribution) -> Mapping[str, Any]:
    """The installer's record of a direct URL (PEP 610), or nothing."""
    text = dist.read_text("direct_url.json")
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------- the file


def write_lock(lock: Lock, file: Path) -> None:
    """Write the lock as TOML; equal locks give equal bytes."""
    lines = [
        "# Written by `surogate plugins lock`. `surogate plugins verify` compares it with what is installed.",
        f"version = {VERSION}",
        f"core = {_text(lock.core)}",
        f"api = {lock.api}",
    ]
    for dist in lock.distributions.values():
        lines += ["", "[[distribution]]", f"name = {_text(dist.name)}", f"version = {_text(dist.version)}"]
        points = ", ".join(f"{_text(n)} = {_text(m)}" for n, m in dist.entry_points.items())
        lines += [f"entry_points = {{ {points} }}", f"editable = {str(dist.editable).lower()}"]
        lines += [f"sha256 = {_text(dist.sha256)}"]
        lines += [f"wheel_sha256 = {_text(dist.wheel_sha256)}"] if dist.wheel_sha256 else []
        lines += ["", "[distribution.files]", *(f"{_text(p)} = {_text(d)}" for p, d in sorted(dist.files.items()))]
    try:
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: the lock cannot be written: {error.strerror}.") from None


def _text(value: str) -> str:
    # A JSON string is a TOML one, but for the delete character.
    return json.dumps(value).replace("\x7f", "\\u007f")


def read_lock(file: Path) -> Lock:
    """The lock in a file. Raises `UserError` that names the file, what is wrong and the fix."""
    fix = f"Fix: surogate plugins lock --output {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: there is no plugin lock. {fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the plugin lock cannot be read: {error}. {fix}") from None
    try:
        return _parse(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise UserError(f"{file}: malformed plugin lock: {error}. {fix}") from None


def _parse(data: Mapping[str, Any]) -> Lock:
    version = _get(data, "version", int)
    if version != VERSION:
        raise ValueError(f"its format is version {version}, this surogate reads version {VERSION}")
    found: dict[str, LockedDistribution] = {}
    for entry in _get(data, "distribution", list) if "distribution" in data else []:
        if not isinstance(entry, dict):
            raise ValueError("`distribution` must be a list of tables")
        dist = LockedDistribution(
            name=_get(entry, "name", str),
            version=_get(entry, "version", str),
            entry_points=_texts(entry, "entry_points"),
            editable=_get(entry, "editable", bool),
            files=_texts(entry, "files"),
            wheel_sha256=_get(entry, "wheel_sha256", str) if "wheel_sha256" in entry else "",
        )
        if dist.name in found:
            raise ValueError(f"{dist.name} is there twice")
        if dist.sha256 != _get(entry, "sha256", str):
            raise ValueError(f"`sha256` of {dist.name} is not that of its `files`")
        found[dist.name] = dist
    return Lock(core=_get(data, "core", str), api=_get(data, "api", int), distributions=found)


def _get(data: Mapping[str, Any], key: str, expected: type) -> Any:
    value = data.get(key)
    if type(value) is not expected:
        raise ValueError(f"`{key}` must be {_NAMES[expected]}" if key in data else f"`{key}` is missing")
    return value


_NAMES = {int: "an integer", str: "a string", bool: "true or false", list: "a list", dict: "a table"}


def _texts(data: Mapping[str, Any], key: str) -> dict[str, str]:
    table = _get(data, key, dict)
    if not all(isinstance(value, str) for value in table.values()):
        raise ValueError(f"`{key}` must be a table of strings")
    return dict(table)


# ------------------------------------------------------------------------------- comparison


def differences(lock: Lock, installed: Lock, *, allow_editable: bool, may_lack: Iterable[str] = ()) -> list[str]:
    """What keeps the installed set from being the locked one; one sentence each, sorted by distribution.

    Distributions of `may_lack` may be in the lock without being installed.
    """
    found = []
    if lock.api != installed.api:
        found.append(f"the hook API is version {installed.api}, locked is {lock.api}")
    if lock.core != installed.core:
        found.append(f"surogate is {installed.core}, locked is {lock.core}")
    absent = lock.distributions.keys() - installed.distributions.keys() - set(may_lack)
    for name in sorted(absent | installed.distributions.keys()):
        if name in absent:
            found.append(f"{name} {lock.distributions[name].version} is locked but not installed")
            continue
        now = installed.distributions[name]
        then = lock.distributions.get(name)
        if then is None:
            points = ", ".join(now.entry_points)
            found.append(f"{name} {now.version} (plugin {points}) is installed but not locked")
            continue
        if now.version != then.version:
            found.append(f"{name} is {now.version}, locked is {then.version}")
        if now.entry_points != then.entry_points:
            found.append(f"{name} has the entry points {_points(now)}, locked are {_points(then)}")
        if now.editable != then.editable:
            how = "not imported from its installed files" if now.editable else "no longer an editable install"
            found.append(f"{name} is {how}")
        if now.editable and not allow_editable:
            found.append(f"{name} is an editable install, which plugins.allow_editable=false refuses")
        if now.version == then.version and now.files != then.files:
            found.append(f"{name} {now.version}: {_changes(then.files, now.files)}")
    return found


def _points(dist: LockedDistribution) -> str:
    return ", ".join(f"{name} = {module}" for name, module in dist.entry_points.items())


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    added = sorted(now.keys() - then.keys())
    changed = [f"{p} is missing" if now[p] == MISSING else f"{p} was added" for p in added]
    changed += [f"{p} is gone" for p in sorted(then.keys() - now.keys())]
    changed += [f"{p} was altered" for p in sorted(now.keys() & then.keys()) if now[p] != then[p]]
    more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return ", ".join(changed[:_SHOWN]) + more


def requirements(lock: Lock, wheels: Path | None = None) -> tuple[str, list[str]]:
    """Requirements for pip and uv with the hashes of wheels, and the distributions whose wheel's hash is not known.

    The hash is the one that the installer recorded, or that of the wheel in the directory `wheels`. A requirement
    without one is written without: with ``--require-hashes`` pip and uv refuse it.
    """
    lines = ["# Install with: pip install --no-deps --require-hashes -r FILE (or: uv pip install …)"]
    unknown = []
    for dist in lock.distributions.values():
        digests = {dist.wheel_sha256} - {""}
        stem = f"{dist.name.replace('-', '_')}-{dist.version}-"
        digests |= {_digest(w) for w in sorted(wheels.glob(f"{stem}*.whl"))} if wheels is not None else set()
        if digests:
            lines.append(" ".join([f"{dist.name}=={dist.version}", *(f"--hash=sha256:{d}" for d in sorted(digests))]))
        else:
            unknown.append(dist.name)
            lines.append(f"{dist.name}=={dist.version}  # the hash of its wheel is not known here")
    return "\n".join(lines) + "\n", unknown
