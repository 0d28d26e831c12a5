"""Rows in memory become a file with the digest of their contents."""

from __future__ import annotations

import datetime
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from surogate_core.api.rows import written
from surogate_core.errors import ConfigError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ü", "completion": "d"}]


def lines(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_equal_rows_have_one_private_file(tmp_path: Path) -> None:
    first = written(ROWS, "datasets", tmp_path)
    assert lines(first) == ROWS
    assert written([dict(row) for row in ROWS], "datasets", tmp_path) == first
    assert written(ROWS[:1], "datasets", tmp_path) != first
    assert stat.S_IMODE(Path(first).stat().st_mode) == 0o600
    assert len(list((tmp_path / "rows").iterdir())) == 2, "nothing half-written is left"


def test_paths_and_entries_stay_and_rows_of_entries_become_paths(tmp_path: Path) -> None:
    assert written(Path("my.jsonl"), "datasets", tmp_path) == "my.jsonl"
    assert written(["a.jsonl", Path("b.jsonl")], "datasets", tmp_path) == ["a.jsonl", "b.jsonl"]
    assert written([{"path": "a", "type": "text"}], "datasets", tmp_path) == [{"path": "a", "type": "text"}]
    assert written([], "datasets", tmp_path) == []
    (entry,) = written([{"path": ROWS, "type": "instruction"}], "datasets", tmp_path)
    assert entry == {"path": written(ROWS, "datasets", tmp_path), "type": "instruction"}


def test_tables_are_rows(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    expected = written(ROWS, "datasets", tmp_path)
    columns = {"prompt": ["a", "ü"], "completion": ["b", "d"]}
    table = Dataset.from_list(ROWS)
    assert written(table, "datasets", tmp_path) == expected
    assert written(columns, "datasets", tmp_path) == expected
    assert written(table.to_pandas(), "datasets", tmp_path) == expected
    assert written(table.data.table, "datasets", tmp_path) == expected
    assert written(iter(ROWS), "datasets", tmp_path) == expected
    assert written([table, "more.jsonl"], "datasets", tmp_path) == [expected, "more.jsonl"]
    with pytest.raises(ConfigError, match=r"splits train, test; choose one. Fix: datasets=data\['train'\]"):
        written(DatasetDict(train=table, test=table), "datasets", tmp_path)


def test_values_of_other_libraries_are_written(tmp_path: Path) -> None:
    row = {"a": np.float32(0.5), "b": np.arange(2), "c": datetime.date(2020, 1, 2), "d": [{"e": None}]}
    assert lines(written([row], "datasets", tmp_path)) == [
        {"a": 0.5, "b": [0, 1], "c": "2020-01-02", "d": [{"e": None}]}
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["text", 3], r"datasets\.1 .*must be a path"),
        ([{"a": 1}, 3], "row 1 must be a dict; got int"),
        ([{"a": object()}], "row 0 cannot be written as JSON: a object"),
        ([{"a": float("nan")}], "row 0 cannot be written as JSON"),
        ([{"a": "\ud800"}], "row 0 cannot be written as JSON"),
        ({"prompt": "a", "completion": "b"}, "got one dict"),
        (SimpleNamespace(), "must be a path.*got SimpleNamespace"),
        (3, "must be a path.*got int"),
        (iter(()), "has no rows"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        written(value, "datasets", tmp_path)
    assert {problem.where for problem in raised.value.problems} == {"keyword argument"}
    assert not (tmp_path / "rows").exists() or not list((tmp_path / "rows").iterdir())
