"""Directories of option files that a user brings: `--config-dir DIR`, `hydra.searchpath=[DIR]`.

Their files choose and set what plugins registered, as every configuration does. Hydra would also make Python objects
of `_target_` keys, set its own launcher and callbacks, and import a package to look for files in it. A file that
asks for any of these is refused before Hydra reads it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_core.conf_paths import expanded
from surogate_core.config.schema import INSTANTIATE_KEYS
from surogate_core.config.yamlfile import YamlFile, read_yaml
from surogate_core.errors import ConfigError, Problem
from surogate_core.plugins.discovery import InstalledPlugin
from surogate_core.plugins.registry import ConfigOption, Registry

MAX_FILES = 10_000
"""Largest number of files of any kind below a directory of options; more means that its path is a mistake."""

_OUTPUTS = frozenset(("run.json", "metrics.jsonl", "multirun.yaml", "sweep.json"))
"""Files that only outputs of runs and sweeps have."""

_HYDRAS_OWN = re.compile(r"(^|[\s/@.])hydra($|[\s/@.:])")
_PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDirectory(InstalledPlugin):
    """A user's directory, in the role of the plugin that offers an option."""

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"directory {self.name}"


def own_file(option: ConfigOption) -> YamlFile | None:
    """The file of a user's option, None for a plugin's."""
    return read_yaml(option.file) if isinstance(option.plugin, OwnDirectory) else None


def add_directories(paths: Any, registry: Registry, where: str) -> list[Problem]:
    """Add the options of each directory to the registry; the mistakes in what is given and in its files."""
    key = "hydra.searchpath"
    if not isinstance(paths, list) or not all(isinstance(p, str) and p for p in paths):
        message = f"must be a list of directories; got {paths!r}."
        return [Problem(key=key, message=message, where=where, fix=f"{key}: [DIRECTORY]")]
    problems = []
    for path in paths:
        scheme, separator, rest = path.partition("://")
        if separator and scheme != "file":
            message = f"{path}: only a directory can be searched; a package brings its options as a plugin."
            problems.append(Problem(key=key, message=message, where=where, fix="file:///DIRECTORY"))
            continue
        directory = Path(expanded(rest if separator else path)).absolute()
        if not directory.is_dir():
            problems.append(Problem(key=key, message=f"there is no directory {directory}.", where=where))
        elif not any(address == f"file://{directory}" for _, address in registry.search_path):
            problems += _add(directory, registry, where)
    return problems


def _add(directory: Path, registry: Registry, where: str) -> list[Problem]:
    owner = OwnDirectory(name=str(directory), module="", distribution="", version="")
    problems: list[Problem] = []
    found: dict[tuple[str, str], Path] = {}
    try:
        for group, file in _option_files(directory):
            if group.partition("/")[0] == "hydra":
                message = "Hydra's own options cannot be replaced."
                problems.append(Problem(key=f"{group}={file.stem}", message=message, where=str(file), fix="remove it"))
                continue
            other = registry.options.get(group, {}).get(file.stem)
            if other is not None:
                message = f"{other.plugin.label} offers this option already."
                problem = Problem(key=f"{group}={file.stem}", message=message, where=str(file), fix="rename the file")
                problems.append(problem)
                continue
            wrong = _mistakes(file)
            problems += wrong
            if not wrong:
                found[group, file.stem] = file
    except ConfigError as error:
        return [*problems, *error.problems]
    except OverflowError:
        message = f"{directory} holds more than {MAX_FILES:,} files; it is not a directory of option files."
        return [Problem(key="hydra.searchpath", message=message, where=where)]
    if problems:
        return problems
    if not found:
        message = f"{directory} has no option files."
        fix = f"put them into directories named for their groups: {directory / 'recipe' / 'mine.yaml'}"
        return [Problem(key="hydra.searchpath", message=message, where=where, fix=fix)]
    for (group, name), file in found.items():
        registry.options.setdefault(group, {})[name] = ConfigOption(file=file, plugin=owner)
    registry.search_path.append((str(directory), f"file://{directory}"))
    return []


def _option_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """(group, file), sorted; `OverflowError` where there are too many files of any kind.

    Directories that runs and sweeps have written are left out.
    """
    seen = 0
    for folder, folders, names in os.walk(directory):
        if Path(folder) != directory and not _OUTPUTS.isdisjoint(names):
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        seen += len(names) + len(folders)
        if seen > MAX_FILES:
            raise OverflowError
        group = Path(folder).relative_to(directory).as_posix()
        if group != ".":
            yield from ((group, Path(folder) / name) for name in sorted(names) if name.endswith(".yaml"))


def _mistakes(file: Path) -> list[Problem]:
    read = read_yaml(file)
    problems = list(read.problems)
    for key in _object_keys(read.values, ""):
        message = "a config cannot name Python objects to call."
        problems.append(Problem(key=key, message=message, where=read.where(key), fix="remove it"))
    packages = _PACKAGE.findall(file.read_text(encoding="utf-8"))
    defaults = read.values.get("defaults")
    entries = list(_texts(defaults)) if defaults is not None else []
    if "hydra" in read.values or any(_HYDRAS_OWN.search(text) for text in [*packages, *entries]):
        message = "Hydra's own keys cannot be set in an option file."
        problems.append(Problem(key="hydra", message=message, where=str(file), fix="set them on the command line"))
    if any(".." in text for text in entries):
        message = "an entry of `defaults` names an option, not a path with `..`."
        problems.append(Problem(key="defaults", message=message, where=read.where("defaults")))
    return problems


def _object_keys(value: Any, key: str) -> Iterator[str]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        path = f"{key}.{name}" if key else str(name)
        if name in INSTANTIATE_KEYS:
            yield path
        yield from _object_keys(item, path)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from (text for item in (*value, *value.values()) for text in _texts(item))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from (text for item in value for text in _texts(item))
    else:
        yield str(value)
