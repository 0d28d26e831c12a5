"""Parquet and Arrow files: columns of any type, nulls that fill up structs, and values that Python cannot hold."""

from __future__ import annotations

import datetime
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from surogate_core.data.encoded import RowError
from surogate_core.data.fields import Unreadable, required_text
from surogate_core.data.rows.chunks import START
from surogate_core.data.rows.sources import SourceSpec, open_source
from surogate_core.errors import UserError

TEXTS = pa.array(["hello", "there"])


def write(path: Path, table: pa.Table) -> Path:
    """The table as Parquet, as an Arrow stream or as an Arrow file with a footer, by the name."""
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return path
    new = pa.ipc.new_file if path.stem == "footer" else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def read(path: Path | str) -> list[Any]:
    return [row for _, row in open_source(SourceSpec(path=str(path))).rows()]


NAMES = ["rows.parquet", "rows.arrow", "footer.arrow"]
ODD = {
    "map": pa.array([[("lang", "en")], [("lang", "de")]], pa.map_(pa.string(), pa.string())),
    "uuid": pa.array([b"0" * 16, b"1" * 16], pa.uuid()),
    "list view": pa.array([["a"], None], pa.list_view(pa.string())),
    "nanoseconds": pa.array([1, 2], pa.timestamp("ns")),
    "date": pa.array([10**7, 0], pa.date32()),
    "bytes": pa.array([b"\xff", b""]),
    "half": pa.array([1.0, 2.0], pa.float16()),
    "duration": pa.array([1, 2], pa.duration("ns")),
    "categories": pa.array(["a", "b"]).dictionary_encode(),
    "decimal": pa.array([1, 2], pa.decimal128(38, 2)),
    "no UTF-8": pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"x"]).buffers()),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_any_type_does_not_stop_the_others(tmp_path: Path, name: str) -> None:
    for kind, column in ODD.items():
        path = write(tmp_path / name, pa.table({"text": TEXTS, "meta": column}))
        assert [row["text"] for row in read(path)] == ["hello", "there"], kind
    path = write(tmp_path / name, pa.table({**ODD, "text": TEXTS}))
    assert [row["text"] for row in read(path)] == ["hello", "there"]


def test_a_value_that_cannot_be_held_is_a_bad_row_where_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", pa.table({"text": ODD["no UTF-8"], "date": ODD["date"]}))
    first, second = read(path)
    assert second["text"] == "x"
    assert second["date"] == datetime.date(1970, 1, 1)
    assert isinstance(first["date"], Unreadable)
    with pytest.raises(RowError, match=r"field 'text' cannot be read: .*utf-8"):
        required_text(first, "text")


@pytest.mark.parametrize("name", NAMES)
def test_nulls_that_fill_up_structs_are_left_out(tmp_path: Path, name: str) -> None:
    rows = [
        {"messages": [{"role": "user", "call": {"a": 1, "list": [None, {"x": 1}]}}], "note": None},
        {"messages": [{"role": "tool", "call": {"b": "x", "list": [{"y": None}]}, "id": "c1"}], "note": "n"},
    ]
    found = read(write(tmp_path / name, pa.Table.from_pylist(rows)))
    assert found[0] == rows[0]
    assert found[1] == {
        "messages": [{"role": "tool", "call": {"b": "x", "list": [{}]}, "id": "c1"}],
        "note": "n",
    }


def test_json_in_a_column_keeps_its_nulls(tmp_path: Path) -> None:
    texts = pa.array(['{"a": null, "b": 1}', "no JSON"], pa.json_())
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 1]), pa.array(['[{"a": null}]'], pa.json_()))
    plain = pa.array(['{"a": null}', "{}"])
    table = pa.table({"json": texts, "nested": nested, "text": plain})
    first, second = read(write(tmp_path / "rows.parquet", table))
    assert first == {"json": {"a": None, "b": 1}, "nested": [[{"a": None}]], "text": '{"a": null}'}
    assert second == {"json": "no JSON", "nested": [], "text": "{}"}


def test_a_saved_data_set_has_the_same_rows(tmp_path: Path) -> None:
    import datasets

    rows = [{"m": [{"role": "user", "a": {"x": 1}}]}, {"m": [{"role": "tool", "a": {"y": 2}}]}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved") == rows


@pytest.mark.parametrize("name", NAMES)
def test_reading_goes_on_at_any_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    table = pa.table({"n": pa.array(range(1000))})
    if name == "rows.parquet":
        parquet.write_table(table, path, row_group_size=300)
    else:
        new = pa.ipc.new_file if path.stem == "footer" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    source = open_source(SourceSpec(path=str(path)))
    chunks = list(source.chunks())
    assert [row["n"] for chunk in chunks for _, row in chunk.rows()] == list(range(1000))
    place = START
    for number, chunk in enumerate(chunks):
        rest = [row for later in source.chunks(place) for row in later.rows()]
        assert rest == [row for later in chunks[number:] for row in later.rows()]
        place = chunk.after
    assert list(source.chunks(place)) == []
    assert [row["n"] for row in read(f"file://{path}")] == list(range(1000))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([TEXTS, TEXTS], names=["text", "text"])
    with pytest.raises(UserError, match=r"rows\.arrow: two columns have the name 'text'\. Fix: "):
        read(write(tmp_path / "rows.arrow", table))


def test_calls_of_parquet_are_those_of_json_lines(tmp_path: Path) -> None:
    rows = [{"c": {"city": "Rome"}}, {"c": {"zone": "CET", "at": [1, 2.5]}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(write(tmp_path / "rows.parquet", pa.Table.from_pylist(rows))) == read(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.int64())])
@pytest.mark.parametrize("offset", [2**30, -5, 3])
def test_damaged_lengths_are_refused(tmp_path: Path, kind: pa.DataType, offset: int) -> None:
    """pyarrow checks none of them by itself, and reads what is behind the file."""
    values = [["hello", "b", "there"], [[1] * 5, [2], [3] * 5]][pa.types.is_list(kind)]
    path = write(tmp_path / "rows.arrow", pa.table({"text": pa.array(values, kind)}))
    content = bytearray(path.read_bytes())
    place = content.find(struct.pack("<4i", 0, 5, 6, 11))
    content[place + 8 : place + 12] = struct.pack("<i", offset)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.arrow"):
        read(path)


def test_values_that_no_type_allows_stop_only_who_reads_them(tmp_path: Path) -> None:
    day = pa.Array.from_buffers(pa.date64(), 1, [None, pa.py_buffer((5).to_bytes(8, "little"))])
    rows = read(write(tmp_path / "rows.arrow", pa.table({"text": TEXTS[:1], "day": day})))
    assert [row["text"] for row in rows] == ["hello"]
