"""The entries of `datasets` and `validation_datasets`: from mappings to checked dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from surogate_core.bundles import DatasetFormat
from surogate_core.data.encoded import RowError
from surogate_core.data.report import BAD_ROWS_SHOWN, BadRow, list_bad_rows
from surogate_core.data.rows.sources import RowSource, SourceSpec
from surogate_core.errors import ConfigError, Problem, UserError

WHOLE_CHUNKS, SAMPLED_CHUNKS = 16, 200
"""Chunks of a data set, of a megabyte or 256 rows: those that are read completely to choose a type, and all sampled
ones.
"""
SAMPLED_ROWS = 20
"""Rows from the beginning of a chunk that is not read completely."""
FIRST_ROWS, MOST_ROWS = 2000, 10_000
"""Rows from which a type is chosen: the first ones, and later ones with other fields, up to the maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """One data set of a run."""

    key: str
    """Its key in the configuration, e.g. ``datasets[0]``."""
    source: SourceSpec
    format: DatasetFormat
    options: Any
    """Instance of the format's options dataclass."""
    chosen: str = ""
    """Why the rows are read as this type, if the type was chosen from the rows."""


def parse_entries(
    entries: Sequence[Mapping[str, Any]], formats: Mapping[str, DatasetFormat], *, key: str
) -> list[DatasetEntry]:
    """Check every entry against its format. Raises `ConfigError` with all mistakes of all entries."""
    problems: list[Problem] = []
    parsed = [_parse(dict(entry), formats, f"{key}[{i}]", problems) for i, entry in enumerate(entries)]
    if problems:
        raise ConfigError(problems)
    return [entry for entry in parsed if entry is not None]


def check_task(
    entry: DatasetEntry, task: str, *, group: int = 1, formats: Mapping[str, DatasetFormat] | None = None
) -> None:
    """Raise `UserError` when the task cannot train on data of the entry's type. `group`: documents of its groups."""
    if entry.format.choose is not None or task in (entry.format.tasks or ()):
        return
    if group > 1 and entry.format.tasks is None:
        types = " or ".join(f.name for f in (formats or {}).values() if task in (f.tasks or ())) or "of groups"
        raise UserError(
            f"{entry.key}: data set {entry.source.path} is of type {entry.format.name}, whose rows are single "
            f"documents; task {task} compares {group} in each row. Fix: data of type {types}."
        )
    if entry.format.tasks is None:
        return
    takers = _listed(entry.format.tasks)
    raise UserError(
        f"{entry.key}: data set {entry.source.path} is of type {entry.format.name}, which task {task} cannot train on; "
        + (f"it is for {takers}. Fix: set `task`." if takers else "a later version will have its trainer.")
    )


def _listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)


def choose_format(entry: DatasetEntry, source: RowSource, formats: Mapping[str, DatasetFormat]) -> DatasetEntry:
    """The entry with the type that is chosen from a sample of its rows, if its type is chosen so.

    Raises `UserError` when no type fits, or no installed plugin offers it.
    """
    if entry.format.choose is None:
        return entry
    place = f"{entry.key}: data set {entry.source.path}"
    rows, bad, bad_count = _sample(source)
    if not rows:
        why = f" Bad rows: {list_bad_rows(bad, bad_count)}" if bad else ""
        fix = "mend the rows" if bad else "check `path`, or set `type`"
        raise UserError(f"{place} has no readable row among those sampled.{why} Fix: {fix}.")
    try:
        choice = entry.format.choose(rows, entry.options)
    except RowError as error:
        raise UserError(f"{place}: {error}. Fix: set `type` and its fields.") from error
    chosen = formats.get(choice.type)
    if chosen is None or chosen.encode is None:
        raise UserError(
            f"{place} looks like type {choice.type}: {choice.reason}. No installed plugin offers that. "
            f"Fix: install the plugin, or set `type` to one of {', '.join(sorted(formats))}."
        )
    problems: list[Problem] = []
    options = _validated(chosen.options, choice.fields, entry.key, problems)
    if problems:
        raise ConfigError(problems)
    fields = ", ".join(f"{name}: {value}" for name, value in choice.fields.items())
    text = f"type {choice.type}{f' ({fields})' if fields else ''}, since {choice.reason}"
    return dataclasses.replace(entry, format=chosen, options=options, chosen=text)


def _sample(source: RowSource) -> tuple[list[Mapping[str, Any]], list[BadRow], int]:
    """Rows from many places, because a field that is empty at the beginning may have something in it later; the first
    rows that cannot be read, and their number.
    """
    rows: list[Mapping[str, Any]] = []
    bad: list[BadRow] = []
    bad_count = 0
    seen: set[frozenset[str]] = set()
    for number, chunk in enumerate(islice(source.chunks(), SAMPLED_CHUNKS)):
        for where, row in chunk.rows() if number < WHOLE_CHUNKS else islice(chunk.rows(), SAMPLED_ROWS):
            if isinstance(row, RowError):
                bad_count += 1
                if len(bad) < BAD_ROWS_SHOWN:
                    bad.append(BadRow.of(where, row))
                continue
            filled = frozenset(name for name, value in row.items() if value or value == 0)
            if len(rows) < FIRST_ROWS or (filled not in seen and len(rows) < MOST_ROWS):
                rows.append(row)
            seen.add(filled)
    return rows, bad, bad_count


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
    if source is not None and source.weight != 1 and key.startswith("validation_"):
        message = "held-out documents are all measured once."
        problems.append(Problem(key=f"{key}.weight", message=message, fix="leave it out"))
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
