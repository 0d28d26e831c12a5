"""Rows in memory as a data file: the run reads them as it reads any other, and the same rows have the same file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surogate_core.config.yamlfile import KEYWORD
from surogate_core.data.fields import INSTRUCTIONS, MESSAGES
from surogate_core.errors import ConfigError, Problem
from surogate_core.files.atomic import disk_error

DATA_KEYS = frozenset({"datasets", "validation_datasets"})
FORM = "a path, entries with `path`, a list of dicts, a datasets.Dataset or a data frame"


def written(value: Any, key: str, cache: Path) -> Any:
    """The value of a data key with paths in place of rows. Files of rows are below `cache`, named by their digest."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return _mapping(dict(value), key, cache)
    if isinstance(value, list | tuple) and any(_is_source(item) for item in value):
        return [written(item, f"{key}.{index}", cache) for index, item in enumerate(value)]
    if isinstance(value, list | tuple) and not value:
        return []
    return str(_write(_rows(value, key), key, cache))


def _is_source(item: Any) -> bool:
    return isinstance(item, str | os.PathLike) or (isinstance(item, Mapping) and _is_entry(item)) or _is_table(item)


def _is_entry(value: Mapping[str, Any]) -> bool:
    """Whether it is an entry of `datasets`, not a row: a row of data has text or messages, no `path` beside `type`."""
    return "path" in value and not value.keys() & {*MESSAGES, *INSTRUCTIONS, "text"}


def _is_table(value: Any) -> bool:
    return any(hasattr(value, name) for name in ("to_dicts", "to_pylist", "to_list", "iterrows"))


def _mapping(value: dict[str, Any], key: str, cache: Path) -> Any:
    if _is_entry(value):
        return {**value, "path": written(value["path"], f"{key}.path", cache)}
    if value and all(_is_table(part) and not isinstance(part, list) for part in value.values()):
        names = list(value)
        fix = f"{key}=data[{names[0]!r}]" + (f", validation_datasets=data[{names[-1]!r}]" if len(names) > 1 else "")
        raise ConfigError([_problem(key, f"has the splits {', '.join(map(str, names))}; choose one.", fix)])
    lengths = {len(column) if isinstance(column, list | tuple) else -1 for column in value.values()}
    if len(lengths) != 1 or lengths == {-1}:
        raise ConfigError([_problem(key, f"must be {FORM}; got one dict.", f"{key}=[{{…}}, {{…}}]")])
    rows = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    return str(_write(_rows(rows, key), key, cache))


def _rows(value: Any, key: str) -> Iterator[Mapping[str, Any]]:
    if hasattr(value, "iterrows"):  # pandas; a missing value is NaN there
        value = ({k: None if _is_nan(v) else v for k, v in row.items()} for row in value.to_dict(orient="records"))
    elif hasattr(value, "to_dicts"):
        value = value.to_dicts()
    elif hasattr(value, "to_pylist"):
        value = value.to_pylist()
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise ConfigError([_problem(key, f"must be {FORM}; got {type(value).__name__}.", "")])
    for number, row in enumerate(value):
        if not isinstance(row, Mapping):
            message = f"row {number} must be a dict; got {type(row).__name__}."
            raise ConfigError([_problem(key, message, f"{key}=[{{'prompt': …, 'completion': …}}, …]")])
        yield row


def _write(rows: Iterator[Mapping[str, Any]], key: str, cache: Path) -> Path:
    """Write the rows as JSON lines that only this user may read; the file, which is either whole or absent."""
    directory = cache / "rows"
    digest, count = hashlib.sha256(), 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=directory, prefix=".rows-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                for row in rows:
                    line = _line(row, count, key)
                    digest.update(line)
                    file.write(line)
                    count += 1
                file.flush()
                os.fsync(file.fileno())
            if not count:
                raise ConfigError([_problem(key, "has no rows.", "")])
            target = directory / f"{digest.hexdigest()[:32]}.jsonl"
            if target.exists():
                return target
            Path(name).replace(target)
            return target
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, what=f"the rows of {key}", path=directory) from error


def _line(row: Mapping[str, Any], number: int, key: str) -> bytes:
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_as_json).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        message = f"row {number} cannot be written as JSON: {error}."
        raise ConfigError([_problem(key, message, "text, numbers, lists and dicts only")]) from None


def _as_json(value: Any) -> Any:
    """Values of other libraries: arrays, numbers of NumPy, dates."""
    for name in ("tolist", "isoformat"):
        if hasattr(value, name):
            return getattr(value, name)()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _problem(key: str, message: str, fix: str) -> Problem:
    return Problem(key=key, message=message, where=KEYWORD, fix=fix)
