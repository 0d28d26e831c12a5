"""The entries of `datasets` and `validation_datasets`: from mappings to checked dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surogate_core.bundles import DatasetFormat
from surogate_core.data.sources import SourceSpec
from surogate_core.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """One data set of a run."""

    key: str
    """Its key in the configuration, e.g. ``datasets[0]``."""
    source: SourceSpec
    format: DatasetFormat
    options: Any
    """Instance of the format's options dataclass."""


def parse_entries(
    entries: Sequence[Mapping[str, Any]], formats: Mapping[str, DatasetFormat], *, key: str
) -> list[DatasetEntry]:
    """Check every entry against its format. Raises `ConfigError` with all that is wrong in any of them."""
    problems: list[Problem] = []
    parsed = [_parse(dict(entry), formats, f"{key}[{i}]", problems) for i, entry in enumerate(entries)]
    if problems:
        raise ConfigError(problems)
    return [entry for entry in parsed if entry is not None]


def _parse(
    entry: dict[str, Any], formats: Mapping[str, DatasetFormat], key: str, problems: list[Problem]
) -> DatasetEntry | None:
    before = len(problems)
    type_name = entry.pop("type", None)
    format_ = formats.get(type_name) if isinstance(type_name, str) else None
    if format_ is None:
        known = ", ".join(sorted(formats)) or "none: no dataset plugin is installed"
        message = f"no such type {type_name!r}; known: {known}." if type_name else f"is missing; known: {known}."
        fix = _nearest(str(type_name), formats) or "set it to one of them, or install the plugin that offers it"
        problems.append(Problem(key=f"{key}.type", message=message, fix=fix))
    if not entry.get("path"):
        problems.append(Problem(key=f"{key}.path", message="is missing.", fix="name a file, directory or hub id"))
        entry["path"] = "?"
    source_names = {f.name for f in dataclasses.fields(SourceSpec)}
    source_values = {name: entry.pop(name) for name in list(entry) if name in source_names}
    source = _validated(SourceSpec, source_values, key, problems)
    options = None
    if format_ is not None:
        option_names = {f.name for f in dataclasses.fields(format_.options)}
        for name in [name for name in entry if name not in option_names]:
            del entry[name]
            problems.append(
                Problem(
                    key=f"{key}.{name}",
                    message=f"no such field in a data set of type {type_name}.",
                    fix=_nearest(name, option_names | source_names | {"type"})
                    or f"it may have {', '.join(sorted(option_names | source_names))}",
                )
            )
        options = _validated(format_.options, entry, key, problems)
    if len(problems) > before:
        return None
    assert format_ is not None
    return DatasetEntry(key=key, source=source, format=format_, options=options)


def _validated(cls: type, values: Mapping[str, Any], key: str, problems: list[Problem]) -> Any:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        for detail in error.errors():
            place = ".".join(str(part) for part in (key, *detail["loc"]))
            problems.append(Problem(key=place, message=f"{detail['msg']}, got {detail['input']!r}."))
        return None


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""
