"""The plugin lock: a file that records what is installed, to the byte, and is compared with it; imports nothing."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

from surogate_core.errors import UserError
from surogate_core.plugins.digests import LINK, MISSING, digest_of, direct_url, installed_files
from surogate_core.plugins.discovery import CORE_DISTRIBUTION, InstalledPlugin, canonical
from surogate_core.plugins.loose import ImportableFiles, loose_modules, owned_by
from surogate_core.plugins.surroundings import FRONT_DOOR, SCOPES, Scope, in_scope, installed_twice, started_code

VERSION = 2
"""Version of the file's format."""

_SHOWN = 3
"""Altered files that a difference names."""

_LARGEST = 64 << 20
"""Bytes of a lock that are read; one of a whole environment with CUDA has less than 10 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDistribution:
    """One distribution."""

    name: str
    """Normalised (PEP 503)."""
    version: str
    entry_points: Mapping[str, str]
    """Entry point of group ``surogate`` → module; empty for the core and for dependencies."""
    editable: bool
    """Whether a module is imported from outside of the installed files: an editable install, or a package before it."""
    files: Mapping[str, str]
    """Path below the directory of installation → SHA-256 of the file, in hexadecimal."""
    wheel_sha256: str = ""
    """SHA-256 of the wheel that it was installed from, where the installer has recorded it."""

    @property
    def sha256(self) -> str:
        """SHA-256 over names and digests of all files, as ``sha256sum`` would list them."""
        lines = "".join(f"{digest}  {path}\n" for path, digest in sorted(self.files.items()))
        return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A set of distributions with plugins, for one version of the core."""

    core: str
    api: int
    distributions: Mapping[str, LockedDistribution]
    scope: Scope = "plugins"
    """The distributions that are locked in addition to the plugins'."""
    started: tuple[str, ...] = ()
    """Code that libraries or Python start by themselves; see `started_code`. Under the scope ``environment`` also
    modules that no distribution has; see `loose_modules`.
    """


# ------------------------------------------------------------------------------- what is installed


def installed_lock(plugins: Iterable[InstalledPlugin], scope: Scope = "plugins") -> Lock:
    """The lock of these plugins, as they are installed now, and of what `scope` adds to them."""
    from surogate_core import API_VERSION, __version__

    found = installed_distributions(plugins, scope)
    lock = Lock(core=__version__, api=API_VERSION, distributions=found, scope=scope, started=started_code())
    if scope != "environment":
        return lock
    return replace(lock, started=(*lock.started, *loose_modules(_owned(lock))))


def _owned(lock: Lock) -> ImportableFiles:
    return owned_by({name: dist.files for name, dist in lock.distributions.items()})


def importable(lock: Lock) -> ImportableFiles:
    """The files that may be imported under a lock of the whole environment: of distributions, and loose ones in it."""
    owned = _owned(lock)
    return owned.joined(place for text, place in loose_modules(owned).items() if text in lock.started)


def installed_distributions(
    plugins: Iterable[InstalledPlugin], scope: Scope = "plugins"
) -> dict[str, LockedDistribution]:
    """Normalised name → the distribution of each plugin, and of what `scope` adds to them, as installed now."""
    groups: dict[str, list[InstalledPlugin]] = {}
    for plugin in plugins:
        groups.setdefault(canonical(plugin.distribution), []).append(plugin)
    found = {}
    for name, members in groups.items():
        entry_point = members[0].entry_point
        dist = entry_point.dist if entry_point is not None else None
        assert dist is not None, "only installed plugins are locked"
        found[name] = _distribution(name, dist, members)
    for name, dist in in_scope(scope, groups).items():
        found.setdefault(name, _distribution(name, dist, ()))
    return dict(sorted(found.items()))


def _distribution(name: str, dist: Distribution, plugins: Sequence[InstalledPlugin]) -> LockedDistribution:
    # The RECORD of an editable install does not name its modules.
    modules = [name.replace("-", "_")] if name in (CORE_DISTRIBUTION, FRONT_DOOR) else [p.module for p in plugins]
    installed = installed_files(dist, modules)
    archive = direct_url(dist).get("archive_info", {})
    hashes = archive.get("hashes", {}) if isinstance(archive, dict) else {}
    return LockedDistribution(
        name=name,
        version=dist.version,
        entry_points={p.name: p.module for p in sorted(plugins, key=lambda p: p.name)},
        editable=installed.elsewhere,
        files=installed.digests,
        wheel_sha256=str(hashes.get("sha256", "")) if isinstance(hashes, dict) else "",
    )


# ------------------------------------------------------------------------------- the file


def write_lock(lock: Lock, file: Path) -> None:
    """Write the lock as TOML; equal locks give equal bytes."""
    lines = [
        "# Written by `surogate plugins lock`. `surogate plugins verify` compares it with what is installed.",
        f"version = {VERSION}",
        f"core = {_text(lock.core)}",
        f"api = {lock.api}",
        f"scope = {_text(lock.scope)}",
        "# What libraries and Python itself start unasked.",
        "started = [",
        *(f"  {_text(text)}," for text in lock.started),
        "]",
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
        text = _lock_text(file)
    except FileNotFoundError:
        raise UserError(f"{file.absolute()}: there is no plugin lock. {fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: the plugin lock cannot be read: {error}. {fix}") from None
    try:
        return _parse(tomllib.loads(text))
    except RecursionError:
        raise UserError(f"{file}: malformed plugin lock: its values are nested too deep. {fix}") from None
    except ValueError as error:
        raise UserError(f"{file}: malformed plugin lock: {error}. {fix}") from None


def _lock_text(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        if status.st_size > _LARGEST:
            raise OSError(f"it has {status.st_size:,} bytes, more than {_LARGEST:,}")
        return stream.read(_LARGEST).decode()


_KEYS = ("version", "core", "api", "scope", "started", "distribution")
_DISTRIBUTION_KEYS = ("name", "version", "entry_points", "editable", "sha256", "wheel_sha256", "files")


def _parse(data: Mapping[str, Any]) -> Lock:
    version = _get(data, "version", int)
    if version != VERSION:
        raise ValueError(f"its format is version {version}, this surogate reads version {VERSION}")
    _refuse_unknown(data, _KEYS)
    scope = next((s for s in SCOPES if s == _get(data, "scope", str)), None)
    if scope is None:
        raise ValueError(f"`scope` must be one of {', '.join(SCOPES)}")
    found: dict[str, LockedDistribution] = {}
    for entry in _get(data, "distribution", list) if "distribution" in data else []:
        if not isinstance(entry, dict):
            raise ValueError("`distribution` must be a list of tables")
        _refuse_unknown(entry, _DISTRIBUTION_KEYS)
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
    started = _get(data, "started", list)
    if not all(isinstance(text, str) for text in started):
        raise ValueError("`started` must be a list of strings")
    core, api = _get(data, "core", str), _get(data, "api", int)
    return Lock(core=core, api=api, distributions=found, scope=scope, started=tuple(started))


def _refuse_unknown(data: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(data.keys() - set(known))
    if unknown:
        raise ValueError(f"there is no key `{unknown[0]}`; known: {', '.join(known)}")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which the installed set is not the locked one."""

    distribution: str
    """Normalised name, or empty where the difference is no distribution's."""
    text: str
    """A sentence without a full stop."""

    def __str__(self) -> str:
        return self.text


def differences(lock: Lock, installed: Lock, *, allow_editable: bool, may_lack: Iterable[str] = ()) -> list[Difference]:
    """How the installed set differs from the locked one, sorted by distribution.

    Distributions of `may_lack` may be in the lock without being installed.
    """
    found = []
    if lock.api != installed.api:
        text = f"the hook API is version {installed.api}, the lock has {lock.api}"
        found.append(Difference(distribution="", text=text))
    if lock.core != installed.core:
        text = f"{CORE_DISTRIBUTION} is {installed.core}, the lock has {lock.core}"
        found.append(Difference(distribution=CORE_DISTRIBUTION, text=text))
    absent = lock.distributions.keys() - installed.distributions.keys() - set(may_lack)
    twice = installed_twice(installed.distributions)
    for name in sorted(absent | installed.distributions.keys()):
        if name in absent:
            texts = [f"{name} {lock.distributions[name].version} is locked but not installed"]
        else:
            then, now = lock.distributions.get(name), installed.distributions[name]
            texts = _distribution_differences(then, now, allow_editable=allow_editable)
        texts += [f"{name} is installed twice: {', '.join(twice[name])}"] if name in twice else []
        found += [Difference(distribution=name, text=text) for text in texts]
    for text in sorted(set(installed.started) - set(lock.started)):
        found.append(Difference(distribution="", text=f"{text} is not locked"))
    return found


def _distribution_differences(
    then: LockedDistribution | None, now: LockedDistribution, *, allow_editable: bool
) -> list[str]:
    name, found = now.name, []
    if then is None:
        points = f" (plugin {', '.join(now.entry_points)})" if now.entry_points else ""
        return [f"{name} {now.version}{points} is installed but not locked"]
    if now.version != then.version:
        found.append(f"{name} is {now.version}, the lock has {then.version}")
    if now.entry_points != then.entry_points:
        found.append(f"{name} has the entry points {_points(now)}, the lock has {_points(then)}")
    if now.editable != then.editable:
        how = "not imported from its installed files" if now.editable else "no longer an editable install"
        found.append(f"{name} is {how}")
    if now.editable and then.editable and not allow_editable:
        found.append(f"{name} is an editable install, which plugins.allow_editable=false refuses")
    if now.version == then.version and now.files != then.files:
        found.append(f"{name} {now.version}: {_changes(then.files, now.files)}")
    return found


def _points(dist: LockedDistribution) -> str:
    return ", ".join(f"{name} = {module}" for name, module in dist.entry_points.items())


def _changes(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    added = sorted(now.keys() - then.keys())
    how = {MISSING: "is missing", LINK: "is a symbolic link"}
    changed = [f"{p} {how.get(now[p], 'was added')}" for p in added]
    changed += [f"{p} is gone" for p in sorted(then.keys() - now.keys())]
    for path in sorted(now.keys() & then.keys()):
        if now[path] != then[path]:
            link = now[path].startswith(LINK) and not then[path].startswith(LINK)
            reason = f": {now[path].removeprefix('unreadable: ')}" if now[path].startswith("unreadable") else ""
            changed.append(f"{path} is a symbolic link" if link else f"{path} was altered{reason}")
    more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return ", ".join(changed[:_SHOWN]) + more


def requirements(lock: Lock, wheels: Path | None = None) -> tuple[str, list[str]]:
    """Requirements for pip and uv with the hashes of wheels, and the distributions whose wheel's hash is not known.

    The hash is the one that the installer recorded, or that of the wheel in the directory `wheels`. A requirement
    without a known hash is written without one; with ``--require-hashes`` pip and uv refuse it.
    """
    lines = ["# Install with: pip install --no-deps --require-hashes -r FILE (or: uv pip install …)"]
    unknown = []
    for dist in lock.distributions.values():
        digests = {dist.wheel_sha256} - {""}
        stem = f"{dist.name.replace('-', '_')}-{dist.version}-"
        digests |= {digest_of(w) for w in sorted(wheels.glob(f"{stem}*.whl"))} if wheels is not None else set()
        if digests:
            lines.append(" ".join([f"{dist.name}=={dist.version}", *(f"--hash=sha256:{d}" for d in sorted(digests))]))
        else:
            unknown.append(dist.name)
            lines.append(f"{dist.name}=={dist.version}  # the hash of its wheel is not known here")
    return "\n".join(lines) + "\n", unknown
