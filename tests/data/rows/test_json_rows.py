"""JSON files: every value is a row, a bad row, or the reason why the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate_core.data.encoded import RowError
from surogate_core.data.rows.sources import SourceSpec, open_source
from surogate_core.errors import UserError

A, B, C = ({"text": f"row {name}"} for name in "abc")
LINE_A, LINE_B, LINE_C = map(json.dumps, (A, B, C))


def found(path: Path, content: str | bytes) -> list[tuple[str, Any]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [(where.rpartition(":")[2], row) for where, row in open_source(SourceSpec(path=str(path))).rows()]


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
@pytest.mark.parametrize("block", [1, 16, 1 << 20])
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (f"[{LINE_A}]\n[{LINE_B},{LINE_C}]\n", "122"),
        (f"[{LINE_A}]\n{LINE_B}\n{LINE_C}", "123"),
        (f"[{LINE_A}][{LINE_B}],[{LINE_C}]", "111"),
        (f"{LINE_A}\n[{LINE_B},{LINE_C}]\n", "122"),
        (f"{LINE_A}{LINE_B}\n{LINE_C}", "112"),
        (f"{LINE_A},\n{LINE_B},\n{LINE_C},\n", "123"),
        (f"{LINE_A}\r{LINE_B}\r{LINE_C}\r", "111"),
        (f"\ufeff{LINE_A}\n\ufeff{LINE_B}\n\ufeff{LINE_C}", "123"),
        (f"\ufeff[{LINE_A}]\n\ufeff[{LINE_B},{LINE_C},]", "122"),
        (f"\n \n{LINE_A}\n\n\n{LINE_B}\r\n\r\n{LINE_C}", "368"),
        ("\n".join(json.dumps(row, indent=1) for row in (A, B, C)), "147"),
        (json.dumps(A, indent=1) + f"[{LINE_B},\n{LINE_C}]", "34"),
    ],
)
def test_all_rows_of_a_mixture_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int, content: str, lines: str
) -> None:
    monkeypatch.setattr("surogate_core.data.rows.json_rows._BLOCK", block)
    rows = found(tmp_path / name, content)
    assert [row for _, row in rows] == [A, B, C]
    if len(lines) == len(rows):
        assert "".join(where for where, _ in rows) == lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"[{LINE_A}]xx", "rows.json:1: the text between JSON values is not JSON: Expecting value"),
        (f"[{LINE_A}]\n]", "rows.json:2: the text between JSON values is not JSON"),
        (f"[{LINE_A}]\n{LINE_B}\n{{broken\n", "rows.json:3: the text between JSON values is not JSON"),
        (f"[{LINE_A}\n,{LINE_B}", "rows.json:2: the JSON array is broken: it is not closed"),
        (f"[{LINE_A}\n,{LINE_B[:-3]}", "rows.json:2: the JSON array is broken: Unterminated string"),
        (f"[{LINE_A},\n\n".encode() + b'{"text": "\xff"}]', "rows.json:3: not UTF-8"),
        (f"[{LINE_A},\n{'[' * 10_000}", "rows.json:2: a value is nested too deeply"),
        (f"[{LINE_A}]\n\0\0", "rows.json:2: the text between JSON values is not JSON"),
        (LINE_A.encode("utf-16"), "rows.json: not UTF-8: it begins with the byte order mark of UTF-16"),
        (b"\xff\xfe\0\0" + LINE_A.encode("utf-32-le"), "the byte order mark of UTF-32"),
    ],
)
def test_what_cannot_be_read_on_is_named_by_file_and_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(UserError) as raised:
        found(tmp_path / "rows.json", content)
    assert message in str(raised.value)
    assert "Fix: " in str(raised.value)


@pytest.mark.parametrize(
    ("line", "reasons"),
    [
        (f"{LINE_A} xx", [None, "not JSON after the first value of the line"]),
        (f"{LINE_A}{LINE_B[:-2]}", [None, "not JSON after the first value of the line"]),
        (LINE_A[:-2], ["not JSON at column 10"]),
        ("[]", ["must be a JSON object, this is an array"]),
        ("[1, 2, 3]", ["this is an array of 3 values"]),
        (f"[[{LINE_A}, {LINE_B}]]", ["this is an array"]),
        (f"{LINE_A}\0", [None, "not JSON after"]),
        ("\0" * 9, ["not"]),
        ('{"n": ' + "1" * 5000 + "}", ["more digits than can be read"]),
        ('{"n": ' + "[" * 10_000, ["nested too deeply"]),
        ('{"n": ' * 10_000, ["nested too deeply"]),
        ('{"text": "a", "n": {"b": 1, "b": 1}}', ["an object has the name 'b' twice"]),
        ('{"text": "a", "text": "b"}{"text": "row a"}', ["an object has the name 'text' twice", None]),
    ],
)
def test_a_bad_line_loses_nothing_else(tmp_path: Path, line: str, reasons: list[str | None]) -> None:
    rows = found(tmp_path / "rows.jsonl", f"{LINE_B}\n{line}\n{LINE_C}")
    assert rows[0] == ("1", B)
    assert rows[-1] == ("3", C)
    assert {where for where, _ in rows[1:-1]} == {"2"}
    for (_, row), reason in zip(rows[1:-1], reasons, strict=True):
        if reason is None:
            assert row == A
        else:
            assert isinstance(row, RowError)
            assert reason in str(row)


def test_an_element_that_cannot_be_kept_loses_nothing_else(tmp_path: Path) -> None:
    content = f'[{LINE_A}, {{"n": {"9" * 5000}}}, {"8" * 5000}, {{"n": 1, "n": 2}}, {LINE_B}]'
    rows = [row for _, row in found(tmp_path / "rows.json", content)]
    assert (rows[0], rows[4]) == (A, B)
    assert all("more digits" in str(row) for row in rows[1:3])
    assert "the name 'n' twice" in str(rows[3])


def test_lines_of_utf16_without_a_mark_are_read_or_bad_rows(tmp_path: Path) -> None:
    rows = [row for _, row in found(tmp_path / "rows.jsonl", f"{LINE_A}\n{LINE_B}\n".encode("utf-16-be"))]
    assert len(rows) >= 2
    assert all(row in (A, B) or isinstance(row, RowError) for row in rows)


def test_a_broken_first_line_is_a_bad_line(tmp_path: Path) -> None:
    rows = found(tmp_path / "rows.json", f'{{"text": \n{LINE_A}\n{LINE_B}')
    assert [where for where, _ in rows] == ["1", "2", "3"]
    assert [isinstance(row, RowError) for _, row in rows] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("blank.jsonl", b"\n" * 9000),
        ("end.jsonl", LINE_A.encode() + b"\n" * 9000 + LINE_B.encode()),
        ("spaces.json", b"[" + LINE_A.encode() + b"," + b" " * 9000 + b"]"),
        ("line.jsonl", LINE_A.encode() + b"\n" + b"x" * 9000),
    ],
)
def test_a_file_that_goes_on_without_a_value_is_refused(
    name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressed file of 1 MB can have a gibibyte of blank lines, which took minutes."""
    for constant, value in (("_MOST_BLANK", 4096), ("_BLOCK", 512), ("_HEAD", 64), ("_LONGEST_LINE", 1024)):
        monkeypatch.setattr(f"surogate_core.data.rows.json_rows.{constant}", value)
    with pytest.raises(UserError, match=rf"{name}.*more than 4,096 (bytes|blank characters) in a row"):
        found(tmp_path / name, content)
    assert [row for _, row in found(tmp_path / name, LINE_A.encode() + b"\n" * 4000 + LINE_B.encode())] == [A, B]


def test_blank_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_core.data.rows.json_rows._BLOCK", 16)
    content = "\n" * 100 + LINE_A + "\n" * 50 + " \n" * 40 + LINE_B
    assert [where for where, _ in found(tmp_path / "rows.jsonl", content)] == ["101", "191"]
