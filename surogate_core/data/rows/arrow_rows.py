"""Rows of Parquet and Arrow files.

A column of any type is read, also of one that only other programs use, because a type of data set reads a few columns.
Structs have the names of all rows, with a null where a row lacks one: such nulls are left out. JSON text in a column of
JSON is decoded, and its nulls stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from surogate_core.data.fields import Unreadable
from surogate_core.data.rows.chunks import CHUNK_ROWS
from surogate_core.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]

_OF_VALUES = re.compile("utf-?8|whole number of days|acceptable range|precision", re.IGNORECASE)
"""Marks errors of single values, in arrays whose lengths are right."""


def parquet_rows(name: str, handle: IO[bytes], skip: int) -> Iterator[Row]:
    """The rows of a Parquet file after the first `skip`. Raises what pyarrow raises."""
    from pyarrow import parquet

    file = parquet.ParquetFile(handle)
    _check_names(name, file.schema_arrow)
    groups, counts = [], [file.metadata.row_group(n).num_rows for n in range(file.metadata.num_row_groups)]
    for number, count in enumerate(counts):
        if skip >= count:
            skip -= count
        else:
            groups = list(range(number, len(counts)))
            break
    if groups:
        yield from _rows(file.iter_batches(CHUNK_ROWS, row_groups=groups), skip)


def arrow_rows(name: str, handle: IO[bytes], skip: int) -> Iterator[Row]:
    """The rows of an Arrow file, as a stream or with a footer, after the first `skip`. Raises what pyarrow raises."""
    import pyarrow as pa

    try:
        reader = pa.ipc.open_stream(handle)
    except pa.ArrowInvalid:
        handle.seek(0)
        file = pa.ipc.open_file(handle)
        _check_names(name, file.schema)
        yield from _rows((file.get_batch(n) for n in range(file.num_record_batches)), skip)
        return
    _check_names(name, reader.schema)
    yield from _rows(reader, skip)


def _check_names(name: str, schema: pa.Schema) -> None:
    twice = next((column for column in schema.names if schema.names.count(column) > 1), None)
    if twice is not None:
        raise UserError(f"data set {name}: two columns have the name {twice!r}. Fix: rename one of them.")


def _rows(batches: Iterator[pa.RecordBatch], skip: int) -> Iterator[Row]:
    for batch in batches:
        rows = batch.num_rows
        if skip >= rows:
            skip -= rows
            continue
        for start in range(skip, rows, CHUNK_ROWS):
            part = batch.slice(start, CHUNK_ROWS)
            names, types = part.schema.names, part.schema.types
            columns = [_values(column, kind) for column, kind in zip(part.columns, types, strict=True)]
            for values in zip(*columns, strict=True) if columns else ():
                yield dict(zip(names, values, strict=True))
        skip = 0


def _values(column: pa.Array, kind: pa.DataType) -> list[Any]:
    """The column's values. One that Python cannot hold is `Unreadable`. Raises `pyarrow.ArrowInvalid` if lengths of its
    values are damaged, which pyarrow would follow out of its memory.
    """
    try:
        column.validate(full=True)
    except Exception as error:
        if not _OF_VALUES.search(str(error)):
            raise
        if _is_nested(kind):  # the check has ended before the parts behind that value
            return [Unreadable(reason=str(error))] * len(column)
    try:
        values = column.to_pylist()
    except Exception:  # dates out of range, text that is not UTF-8: pyarrow and pandas share no error
        values = [_value(scalar) for scalar in column]
    return [unpadded(value, kind, json_is_text=True) for value in values] if _is_nested(kind) else values


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except Exception as error:
        return Unreadable(reason=str(error))


def unpadded(value: Any, kind: pa.DataType, *, json_is_text: bool) -> Any:
    """The value without the nulls that fill up structs. `json_is_text`: whether JSON in it is yet to be decoded."""
    import pyarrow as pa

    if value is None or isinstance(value, Unreadable):
        return value
    if _is_json(kind):
        if json_is_text and isinstance(value, str):
            with suppress(ValueError, RecursionError):
                return json.loads(value)
        return value
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        fields = {field.name: field.type for field in kind}
        return {
            name: unpadded(inner, fields[name], json_is_text=json_is_text) if name in fields else inner
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list) and hasattr(kind, "value_type") and not pa.types.is_map(kind):
        return [unpadded(inner, kind.value_type, json_is_text=json_is_text) for inner in value]
    return value


def _is_json(kind: pa.DataType) -> bool:
    return getattr(kind, "extension_name", "") == "arrow.json"


def _is_nested(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(kind)) or _is_json(kind)
