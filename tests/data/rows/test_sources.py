"""Rows of every kind of source, and what is said about broken ones."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.data.encoded import RowError
from surogate_core.data.rows import chunks as chunks_module
from surogate_core.data.rows import json_rows
from surogate_core.data.rows.sources import SourceSpec, open_source
from surogate_core.errors import UserError
from surogate_core.files.paths import resolve_package_path

_NAMES = ["rows.jsonl", "rows.json"]
ROWS = [{"text": f"row {i}", "n": i} for i in range(5)]


def read(path: Path | str, **fields: Any) -> list[Any]:
    return [row for _, row in open_source(SourceSpec(path=str(path), **fields)).rows()]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as Parquet, CSV, TSV or Arrow, by the path's suffix."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    table = pa.Table.from_pylist(rows)
    match path.suffix:
        case ".parquet":
            parquet.write_table(table, path)
        case ".csv":
            csv.write_csv(table, path)
        case ".tsv":
            csv.write_csv(table, path, csv.WriteOptions(delimiter="\t"))
        case ".arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    return path


def test_json_lines_know_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n[1]\nnull\n{"a": "\xff"}\r\n' + b"[" * 100_000 + b'\n{"a": 2}')
    found = list(open_source(SourceSpec(path=str(path))).rows())
    assert [where.rsplit(":", 1)[1] for where, _ in found] == ["1", "3", "4", "5", "6", "7", "8"]
    good = [row for _, row in found if not isinstance(row, RowError)]
    assert good == [{"a": 1}, {"a": 2}]
    reasons = [str(row) for _, row in found if isinstance(row, RowError)]
    for reason, expected in zip(reasons, ["not JSON", "an array", "null", "not UTF-8", "nested"], strict=True):
        assert expected in reason


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_a_json_array_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, block: int
) -> None:
    monkeypatch.setattr("surogate_core.data.rows.json_rows._BLOCK", block)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([*ROWS, 12, "é"], indent=indent, ensure_ascii=False), encoding="utf-8")
    found = list(open_source(SourceSpec(path=str(path))).rows())
    assert [row for _, row in found[:5]] == ROWS
    assert all(isinstance(row, RowError) for _, row in found[5:])
    if indent:
        assert [int(where.rsplit(":", 1)[1]) for where, _ in found[:5]] == [2, 6, 10, 14, 18]


def test_a_json_file_of_lines_is_read_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert read(path) == ROWS


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": ', '[{"a": 1} x]', "[1, 2"])
def test_a_broken_json_array_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"rows\.json:1: the JSON array is broken"):
        read(path)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_tables_are_streamed(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path / f"rows{suffix}", ROWS)
    found = list(open_source(SourceSpec(path=str(path))).rows())
    assert [row for _, row in found] == ROWS
    assert found[1][0] == f"{path} row 2"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    path = write_table(tmp_path / f"rows{suffix}", ROWS)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=rf"rows\{suffix}: cannot be read"):
        read(path)


def test_a_directory_is_split_by_the_names_of_its_files(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    for name in ("d/a-train.jsonl", "d/more/b.jsonl", "d/validation.jsonl", "d/.hidden/x.jsonl", "d/notes.txt"):
        write_rows([{"file": name}], name)
    (tmp_path / "d" / "loop").symlink_to(tmp_path / "d", target_is_directory=True)
    assert read(tmp_path / "d") == [{"file": "d/a-train.jsonl"}, {"file": "d/more/b.jsonl"}]
    assert read(tmp_path / "d", split="validation") == [{"file": "d/validation.jsonl"}]
    assert read(tmp_path / "d", subset="more") == [{"file": "d/more/b.jsonl"}]
    with pytest.raises(UserError, match=r"no file of split 'test'; the directory has train \(2 files\), validation"):
        read(tmp_path / "d", split="test")


def test_a_directory_saved_by_datasets_is_read(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "many"))
    assert read(tmp_path / "one") == read(tmp_path / "many") == ROWS
    assert read(tmp_path / "many", split="test") == ROWS[:1]
    with pytest.raises(UserError, match="only train, test"):
        read(tmp_path / "many", split="dev")


def test_samples_takes_the_first_rows(write_rows: Callable[..., Path]) -> None:
    path = write_rows(ROWS)
    assert read(path, samples=2) == ROWS[:2]
    digests = {open_source(SourceSpec(path=str(path), samples=n)).digest for n in (None, 2, 3)}
    assert len(digests) == 3


def test_the_digest_is_of_the_content(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    a, b, c = write_rows(ROWS, "a.jsonl"), write_rows(ROWS, "b.jsonl"), write_rows(ROWS[:-1], "c.jsonl")
    digest = {p.name: open_source(SourceSpec(path=str(p))).digest for p in (a, b, c)}
    assert digest["a.jsonl"] == digest["b.jsonl"] != digest["c.jsonl"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("missing.jsonl", "no such file or directory"),
        ("./missing", "no such file or directory"),
        ("/nowhere/at/all", "no such file or directory"),
        ("pkg://no_such_package/x.jsonl", "no package 'no_such_package' is installed"),
        ("pkg://surogate_core/no/such.jsonl", "has no file"),
        ("pkg://surogate_core/../conf/config.yaml", "has no file"),
        ("nowhere://host/x.jsonl", "cannot be reached"),
        ("s3://bucket/x", "must end in one of"),
    ],
)
def test_a_missing_source_is_one_clear_line(path: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        open_source(SourceSpec(path=path))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_file_is_told_its_neighbour(write_rows: Callable[..., Path]) -> None:
    path = write_rows(ROWS, "train.jsonl")
    with pytest.raises(UserError, match=r"did you mean .*train\.jsonl\?"):
        open_source(SourceSpec(path=str(path.with_name("trian.jsonl"))))


def test_an_unknown_suffix_and_an_empty_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"'\.xlsx' cannot be read"):
        open_source(SourceSpec(path=str(tmp_path / "rows.xlsx")))
    with pytest.raises(UserError, match="holds no data files"):
        open_source(SourceSpec(path=str(tmp_path / "empty")))


def test_package_paths_do_not_import_the_package() -> None:
    import sys

    assert Path(resolve_package_path("pkg://xml/dom/minidom.py")).exists()
    assert resolve_package_path("some/path") == "some/path"
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("text", ["1" * 5000, '{"a": ' + "1" * 5000 + "}", "[" + "9" * 5000 + "]"])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_numbers_past_pythons_limit_are_bad_rows(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    try:
        rows = read(path)
    except UserError:
        return
    assert all(isinstance(row, RowError) for row in rows)


_FRAGMENTS = st.sampled_from(
    [b"{", b"}", b"[", b"]", b'"', b",", b":", b"a", b"1", b"\n", b"\\", b"\xff", b"null", b" "]
)


@given(content=st.binary(max_size=60) | st.lists(_FRAGMENTS, max_size=30).map(b"".join), name=st.sampled_from(_NAMES))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_rows_or_one_clear_line(content: bytes, name: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / name
        path.write_bytes(content)
        try:
            rows = read(path)
        except UserError as error:
            rows, message = [], str(error)
        else:
            message = str(path)
        assert str(path) in message
        assert "\n" not in message
        assert all(isinstance(row, dict | RowError) for row in rows)


@pytest.mark.slow_cases("rows.parquet")
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_reading_goes_on_from_any_border_of_chunks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "_BLOCK", 500)
    monkeypatch.setattr(chunks_module, "CHUNK_ROWS", 7)
    directory = tmp_path / "data"
    directory.mkdir()
    for number in range(2):
        path = directory / f"{number}-{name}"
        rows = [{"text": f"row {i} of {number}", "n": i} for i in range(60)]
        match path.suffix:
            case ".jsonl":
                path.write_bytes(b"\xef\xbb\xbf" * number + "\r\n\n".join(map(json.dumps, rows)).encode())
            case ".json":
                path.write_text(json.dumps(rows, indent=1))
            case _:
                write_table(path, rows)
    source = open_source(SourceSpec(path=str(directory)))
    chunks = list(source.chunks())
    assert len(chunks) > 4
    whole = [row for chunk in chunks for row in chunk.rows()]
    assert [row["text"] for _, row in whole] == [f"row {i} of {n}" for n in range(2) for i in range(60)]
    assert whole == list(source.rows())
    for number, chunk in enumerate(chunks):
        rest = [row for later in chunks[number + 1 :] for row in later.rows()]
        assert [row for later in source.chunks(chunk.after) for row in later.rows()] == rest
    assert all(a.done <= b.done for a, b in pairwise(chunks))


def test_a_line_that_would_fill_the_memory_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "_BLOCK", 64)
    monkeypatch.setattr(json_rows, "_LONGEST_LINE", 200)
    path = tmp_path / "rows.jsonl"
    lines = ['{"n": 1}', '{"n": "' + "x" * 5000 + '"}', '{"n": 3}', "", '{"n": 5}']
    path.write_text("\n".join(lines))
    rows = list(open_source(SourceSpec(path=str(path))).rows())
    assert [where.rpartition(":")[2] for where, _ in rows] == ["1", "2", "3", "5"]
    assert isinstance(rows[1][1], RowError)
    assert "longer than" in str(rows[1][1])
    assert [row["n"] for _, row in rows if not isinstance(row, RowError)] == [1, 3, 5]


def test_lines_of_a_url_are_named_by_their_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\nbroken\n{"n": 3}\n')
    rows = list(open_source(SourceSpec(path=f"file://{path}")).rows())
    assert rows[0][1] == {"n": 1}
    assert isinstance(rows[1][1], RowError)
    assert rows[1][0].endswith("rows.jsonl:2")


def test_the_revision_of_a_hub_data_set_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(path: str, **options: Any) -> Any:
        asked.update(options, path=path)
        return datasets.Dataset.from_list([{"n": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source(SourceSpec(path="owner/name", subset="s", split="test", revision="v1"))
    assert asked == {"path": "owner/name", "name": "s", "split": "test", "revision": "v1"}
    assert [row for _, row in source.rows()] == [{"n": 1}]


def test_offline_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)

    def load(path: str, **options: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match="unset HF_HUB_OFFLINE"):
        open_source(SourceSpec(path="owner/name"))


def test_links_that_go_round_do_not_hang(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    write_rows([{"n": 1}], "data/train.jsonl")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "self.jsonl").symlink_to(tmp_path / "data" / "self.jsonl")
    assert [row for _, row in open_source(SourceSpec(path=str(tmp_path / "data"))).rows()] == [{"n": 1}]
    with pytest.raises(UserError):
        open_source(SourceSpec(path=str(tmp_path / "data" / "self.jsonl")))


def test_a_broken_line_far_down_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"n":1}\n' * 999_999)
        file.write(b'{"n":\n{"n":2}\n')
    bad = [(where, row) for where, row in open_source(SourceSpec(path=str(path))).rows() if isinstance(row, RowError)]
    assert [where for where, _ in bad] == [f"{path}:1000000"]
    assert "not JSON" in str(bad[0][1])


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_a_name_with_the_signs_of_patterns_is_a_name(tmp_path: Path, suffix: str) -> None:
    for name in ("x*y", "xAy", "a[1]"):
        rows = [{"text": f"of {name}", "n": 1}]
        path = tmp_path / f"{name}{suffix}"
        if suffix == ".jsonl":
            path.write_text(json.dumps(rows[0]))
        else:
            write_table(path, rows)
    for name in ("x*y", "a[1]"):
        assert [row["text"] for row in read(tmp_path / f"{name}{suffix}")] == [f"of {name}"]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="neither a file nor a directory"):
        read(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="rename the file"):
        read(write_table(tmp_path / "a::b.parquet", ROWS))


def test_a_parquet_file_without_rows_is_whole(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert read(tmp_path / "none.parquet") == []


def test_a_reason_has_no_control_characters_and_the_library_is_silent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_table(tmp_path / "rows.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-30] + b"\x0f\x1b[31m" * 4 + path.read_bytes()[-8:])
    with pytest.raises(UserError) as raised:
        read(path)
    assert str(raised.value).isprintable()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("https://host/rows.jsonl", "https:// is not installed: .*Fix: `pip install 'fsspec\\[http\\]'`, or download"),
        ("s3://bucket/rows.csv", "s3:// is not installed: .*Fix: `pip install 'fsspec\\[s3\\]'`, or download"),
        ("gs://bucket/rows.jsonl.gz", "gs:// is not installed: .*Fix: `pip install 'fsspec\\[gcs\\]'`, or download"),
        ("oci://bucket/rows.jsonl", "oci:// is not installed: .*Fix: install the package that does, or download"),
    ],
)
def test_a_url_without_the_package_that_reads_it_names_the_package(
    monkeypatch: pytest.MonkeyPatch, url: str, fix: str
) -> None:
    import fsspec

    def missing(url: str) -> Any:
        raise ImportError("Install it to access that")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=fix):
        open_source(SourceSpec(path=url))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e308, 0, -1, 10**400])
def test_weights_without_a_sense_are_refused(value: Any) -> None:
    from surogate_core.data.entries import parse_entries
    from surogate_core.errors import ConfigError
    from surogate_core.plugins import load_plugins

    entry = {"path": "x.jsonl", "type": "text", "weight": value}
    with pytest.raises(ConfigError, match="weight"):
        parse_entries([entry], load_plugins().all("dataset"), key="datasets")


def test_samples_beyond_any_file_take_all(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    assert read(write_rows(ROWS), samples=10**400) == ROWS


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("d", {"subset": "moer"}, "no subdirectory 'moer', which `subset` names; the directory has more"),
        ("d", {"revision": "v1"}, "`revision` would be ignored: the data set is on this machine"),
        ("d/a.jsonl", {"subset": "more", "revision": "v1"}, "`revision` and `subset` would be ignored"),
        ("file://a.jsonl", {"subset": "more"}, "`subset` would be ignored: the data set is a URL"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(
    tmp_path: Path, write_rows: Callable[..., Path], path: str, fields: Any, message: str
) -> None:
    write_rows(ROWS, "d/a.jsonl")
    write_rows(ROWS, "d/more/b.jsonl")
    with pytest.raises(UserError, match="Fix: ") as raised:
        read(path if "://" in path else tmp_path / path, **fields)
    assert message in str(raised.value)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_empty_parts_of_a_table_lose_nothing(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / f"rows{suffix}"
    table = pa.Table.from_pylist(ROWS)
    parts = [table.slice(0, 0), table.slice(0, 2), table.slice(2, 0), table.slice(2)]
    if suffix == ".parquet":
        with parquet.ParquetWriter(path, table.schema) as writer:
            for part in parts:
                writer.write_table(part)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            for part in parts:
                for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]:
                    stream.write_batch(batch)
    assert read(path) == ROWS


def test_a_parquet_file_whose_column_names_are_no_text_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "rows.parquet", [{"instruction": "a"}])
    path.write_bytes(path.read_bytes().replace(b"instruction", b"instru\xf4tion"))
    with pytest.raises(UserError, match=r"rows\.parquet"):
        read(path)
