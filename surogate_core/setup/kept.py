"""Figures that cost seconds and are a pure function of what is installed and asked for: kept in the data cache.

They are found once and then read. Figures that are torn or foreign in the cache are found again. What cannot be kept is
found each time.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surogate_core.config.schema import RunConfig
from surogate_core.data.cache import DataCache, digest_of
from surogate_core.errors import SurogateError
from surogate_core.files.paths import cache_root

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry

T = TypeVar("T")

_SETTLED_NS = 2 * 10**9
"""A file that changed less than this many nanoseconds ago may change again within the same clock tick."""
_MOST_FILES = 10_000
"""Files of a directory whose facts are read; figures that depend on more are not kept."""
_VARIABLES = ("SUROGATE_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_")
"""Beginnings of the names of variables that may decide what is found."""


class NotKeptError(Exception):
    """It cannot be said what the figures depend on."""


def kept(
    kind: str,
    config: RunConfig,
    registry: Registry,
    depends: Callable[[], Any],
    *,
    find: Callable[[], T],
    write: Callable[[T], Mapping[str, Any]],
    read: Callable[[Mapping[str, Any]], T],
) -> T:
    """What `find` returns, from the cache if it is there.

    `depends` says what decides the result besides the configuration, the installed code and the machine's variables, or
    raises `NotKeptError`. `write` makes JSON values of a result, and `read` a result of those; it raises `ValueError`,
    `TypeError` or `KeyError` for anything else. What `find` raises passes through.
    """
    try:
        key = digest_of(
            {
                "config": plain(config),
                "depends": plain(depends()),
                "python": [platform.python_version(), version("torch")],
                "variables": _variables(),
                "code": _code(registry),
            }
        )
    except (NotKeptError, SurogateError, OSError):
        return find()
    cache = DataCache(cache_root(config.data_cache_dir), kind)
    with suppress(SurogateError, ValueError, TypeError, KeyError):
        if (entry := cache.get(key)) is not None:
            return read(entry.facts)
    found = find()
    with suppress(SurogateError, OSError):
        cache.get_or_build(key, lambda directory: write(found))
    return found


def plain(value: Any) -> Any:
    """A value as JSON values that are equal in every process; raises `NotKeptError` for an object that has none."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": plain(type(value)), **fields}
    if isinstance(value, Mapping):
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, Set):
        return sorted(str(plain(item)) for item in value)
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Path) or type(value).__module__ == "torch":  # a dtype or a device
        return str(value)
    raise NotKeptError(type(value))


def file_facts(root: Path) -> list[tuple[str, int, int, int, int]]:
    """(path, bytes, time of change, time of the inode's change, inode) of a file, or of each file below a directory.

    Raises `NotKeptError` if one changed just now, or if there are too many.
    """
    found = [root] if root.is_file() else [Path(at, name) for at, _, names in os.walk(root) for name in names]
    if len(found) > _MOST_FILES:
        raise NotKeptError(root)
    facts = []
    for path in sorted(path for path in found if path.suffix != ".pyc"):
        status = path.stat()
        if max(status.st_mtime_ns, status.st_ctime_ns) > time.time_ns() - _SETTLED_NS:
            raise NotKeptError(path)
        facts.append((str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return facts


def _variables() -> dict[str, str]:
    named = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    return {name: value for name, value in named.items() if name != "SUROGATE_LOG_DIR"}


def _code(registry: Registry) -> list[Any]:
    """The installed distributions with their versions, and the facts of each file of Surogate and its plugins."""
    roots = {_package(plugin.module.partition(":")[0]) for plugin in registry.plugins.values()}
    installed: set[str] = set()
    for place in {Path(entry or ".").resolve() for entry in sys.path}:
        with suppress(OSError):
            names = [path.name for path in place.iterdir()]
            installed.update(name for name in names if name.endswith((".dist-info", ".egg-info")))
            packages = (place / name for name in names if name.startswith("surogate"))
            roots.update(package for package in packages if (package / "__init__.py").exists())
    return [sorted(registry.plugins), sorted(installed), [_package_facts(root) for root in sorted(roots)]]


@cache
def _package_facts(root: Path) -> list[Any]:
    """The facts of a package, as it was when the process needed them first."""
    return file_facts(root)


def _package(module: str) -> Path:
    """The directory of a plugin's package, or the file of its module."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise NotKeptError(module)
    path = Path(file).resolve()
    return path.parent if path.stem == "__init__" else path
