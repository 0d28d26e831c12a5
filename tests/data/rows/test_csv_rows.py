"""CSV and TSV: cells are text, and every line is in a row, a bad row or the reason why the file is refused."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.data.encoded import RowError
from surogate_core.data.rows.sources import SourceSpec, open_source
from surogate_core.errors import UserError


def found(path: Path, content: str | bytes) -> list[tuple[str, Any]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(where.rpartition(":")[2], row) for where, row in open_source(SourceSpec(path=str(path))).rows()]


def rows_of(path: Path, content: str | bytes) -> list[Any]:
    return [row for _, row in found(path, content)]


CELLS = [
    "007",
    "NA",
    "null",
    "None",
    "nan",
    "-0.0",
    "1e5",
    "12",
    "TRUE",
    "2020-01-01",
    "",
    " x ",
    "1" * 400,
    "inf",
    "#",
]


def test_every_cell_is_the_text_that_it_is(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.csv", "n,cell\n" + "".join(f"{i},{cell}\n" for i, cell in enumerate(CELLS)))
    assert rows == [{"n": str(i), "cell": cell} for i, cell in enumerate(CELLS)]


def test_the_text_of_a_cell_does_not_depend_on_the_others(tmp_path: Path) -> None:
    """A library that guesses types reads a column of digits as numbers until a text comes."""
    rows = rows_of(tmp_path / "rows.csv", "q,a\n" + "1,01\n" * 20_000 + "x,y\n")
    assert rows == [{"q": "1", "a": "01"}] * 20_000 + [{"q": "x", "a": "y"}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('a,b\n"1,""x""","2\n3"\n4,5\n', [("2", {"a": '1,"x"', "b": "2\n3"}), ("4", {"a": "4", "b": "5"})]),
        ("\ufeffa,b\r\n1,2\r\n\r\n3,4", [("2", {"a": "1", "b": "2"}), ("4", {"a": "3", "b": "4"})]),
        ("a,b\r1,2\r3,4\r", [("2", {"a": "1", "b": "2"}), ("3", {"a": "3", "b": "4"})]),
        ("\n\na,b\n1,2\n  \n3,4", [("4", {"a": "1", "b": "2"}), ("6", {"a": "3", "b": "4"})]),
        (",a\n0,1\n", [("2", {"Unnamed: 0": "0", "a": "1"})]),
        ("a,b\n", []),
        ("", []),
    ],
)
def test_forms_of_csv(tmp_path: Path, content: str, expected: list[Any]) -> None:
    assert found(tmp_path / "rows.csv", content) == expected


def test_tsv(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.tsv", 'a\tb\n1,5\t"x\ty"\n')
    assert rows == [{"a": "1,5", "b": "x\ty"}]


@pytest.mark.parametrize(
    ("bad", "lines", "reason"),
    [
        ("1,2,3", ["3"], "the row has 3 cells, the header names 2 columns"),
        ("1", ["3"], "the row has 1 cell, the header names 2 columns"),
        ('"1"x,2', ["3"], "not CSV: text after a closing quote"),
        ('1,"2\n3,"q"', ["3", "4"], "not CSV in the row of lines 3 to 4"),
        (b"\xff,2", ["3"], "not UTF-8"),
    ],
)
def test_a_bad_row_is_named_and_loses_nothing_else(
    tmp_path: Path, bad: str | bytes, lines: list[str], reason: str
) -> None:
    content = b"a,b\n1,2\n" + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n3,4\n"
    rows = found(tmp_path / "rows.csv", content)
    assert rows[0] == ("2", {"a": "1", "b": "2"})
    assert rows[-1] == (str(len(lines) + 3), {"a": "3", "b": "4"})
    assert [where for where, _ in rows[1:-1]] == lines
    for _, row in rows[1:-1]:
        assert isinstance(row, RowError)
        assert reason in str(row)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", 'a,b\n1,"2\n3,4\n5,6\n', "rows.csv:2: a quote that is opened here is never closed"),
        ("rows.csv", "a,b,a\n1,2,3\n", "rows.csv:1: the header names 'a' more than once"),
        ("rows.csv", "a;b\n1;2\n", "rows.csv:1: the header is one column, 'a;b'; columns are separated by commas"),
        ("rows.csv", "a\tb\n1\t2\n", "or name it .tsv"),
        ("rows.tsv", "a,b\n1,2\n", "columns are separated by tabs"),
        ("rows.csv", b"\xff,b\n1,2\n", "rows.csv:1: the header cannot be read: not UTF-8"),
        ("rows.csv", "a,b\n1,2\n".encode("utf-16"), "the byte order mark of UTF-16"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: str | bytes, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as raised:
        found(tmp_path / name, content)
    assert message in str(raised.value)
    assert "Fix: " in str(raised.value)
    assert capfd.readouterr().err == ""


def test_a_last_line_that_is_cut_in_a_quote_is_a_bad_row(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows.csv", 'a,b\n1,2\n3,"4')
    assert rows[0] == {"a": "1", "b": "2"}
    assert "never closed" in str(rows[1])


def test_a_line_that_would_fill_the_memory_ends_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_core.data.rows.csv_rows._LONGEST_CELL", 100)
    with pytest.raises(UserError, match=r"rows\.csv:2: the line is longer than 100 characters"):
        found(tmp_path / "rows.csv", "a,b\n" + "x" * 500)
    with pytest.raises(UserError, match=r"rows\.csv:2: a quote that is opened here is never closed"):
        found(tmp_path / "rows.csv", 'a,b\n1,"' + "x\n" * 500)
    csv.field_size_limit(1 << 28)


TEXT = st.text(st.sampled_from('ab",\n\r é\t'), max_size=6)


@given(rows=st.lists(st.tuples(TEXT, TEXT).filter(lambda cells: "".join(cells).strip()), max_size=8))
@settings(max_examples=100, deadline=None)
def test_what_a_writer_writes_is_read_back(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([("a", "b"), *rows])
    path = tmp_path_factory.getbasetemp() / "written.csv"
    assert rows_of(path, text.getvalue()) == [{"a": a, "b": b} for a, b in rows]


def test_blank_lines_without_an_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_core.data.rows.csv_rows._MOST_BLANK", 100)
    assert rows_of(tmp_path / "rows.csv", "a,b\n" + "\n" * 100 + "1,2\n") == [{"a": "1", "b": "2"}]
    with pytest.raises(UserError, match=r"rows\.csv:\d+: more than 100 blank lines in a row"):
        rows_of(tmp_path / "rows.csv", "a,b\n1,2\n" + "\n" * 102)
