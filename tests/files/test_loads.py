"""The loads of experts: columns whose number is bounded, and what the script of a page draws."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import numpy as np
import pytest

from surogate_core.files.loads import CELLS, COLUMNS, FEWEST, SHOWN, Loads


def record(step: int, tokens: Any, *, steps: int = 1, layers: Any = (1, 3)) -> dict[str, Any]:
    return {"event": "expert_loads", "step": step, "steps": steps, "layers": layers, "tokens": tokens}


def of(*records: dict[str, Any]) -> Loads:
    found = Loads()
    for one in records:
        found.add(one)
    return found


def test_many_records_are_joined_and_lose_no_token() -> None:
    count = 3 * COLUMNS + 7
    found = of(*(record(2 * at, [[at, 1], [0, 2]], steps=2) for at in range(1, count + 1)))
    assert len(found.columns) <= COLUMNS
    assert len(found.shown()) <= SHOWN
    for columns in (found.columns, found.shown()):
        assert (columns[0].first, columns[-1].last) == (1, 2 * count)
        assert all(before.last + 1 == after.first for before, after in itertools.pairwise(columns))
        total = sum(column.tokens_LE for column in columns)
        assert np.array_equal(total, [[count * (count + 1) // 2, count], [0, 2 * count]])


def test_a_model_with_many_experts_has_fewer_columns() -> None:
    tokens = np.ones((94, 128), int).tolist()
    found = of(*(record(at, tokens, layers=list(range(94))) for at in range(1, 201)))
    assert FEWEST <= len(found.shown()) <= max(FEWEST, CELLS // (94 * 128)) < SHOWN


def test_a_run_that_goes_back_drops_what_it_had_after() -> None:
    found = of(*(record(at, [[at, 1], [1, 1]]) for at in range(1, 6)), record(4, [[9, 9], [9, 9]], steps=2))
    assert [(column.first, column.last) for column in found.columns] == [(1, 1), (2, 2), (3, 4)]
    found.drop_after(2)
    assert [column.last for column in found.columns] == [1, 2]


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"step": 2, "steps": 1, "layers": [1, 3], "tokens": [[1, 2], [3]]},
        {"step": 2, "steps": 1, "layers": [1], "tokens": [[1, 2], [3, 4]]},
        {"step": 2, "steps": 1, "layers": [1, 3], "tokens": "NaN"},
        {"step": 2, "steps": 1, "layers": [1, 3], "tokens": [[], []]},
        {"step": 2, "steps": 1, "layers": [1, 3], "tokens": [[1, 2, 3], [4, 5, 6]]},
        {"step": "x", "steps": 1, "layers": [1, 3], "tokens": [[1, 2], [3, 4]]},
    ],
)
def test_damaged_records_are_left_out(damaged: dict[str, Any]) -> None:
    found = of(record(1, [[1, 2], [3, 4]]), damaged)
    assert len(found.columns) == 1
    assert Loads().data() is None


def test_the_scripts_data_has_every_load() -> None:
    found = of(record(1, [[4, 0, 1, 3], [2, 2, 2, 2]]), record(3, [[8, 0, 0, 0], [1, 1, 1, 5]], steps=2)).data()
    assert found is not None
    assert (found["layers"], found["experts"], found["bounds"]) == ([1, 3], 4, [[1, 1], [2, 3]])
    cells = np.frombuffer(base64.b64decode(found["cells"]), np.uint8).reshape(2, 4, 2).astype(float)
    loads = np.where(cells == 0, 0.0, 2 ** ((cells - 128) / 127 * found["span"]))
    np.testing.assert_allclose(loads[0], [[2, 4], [0, 0], [0.5, 0], [1.5, 0]], rtol=0.02)
    np.testing.assert_allclose(loads[1], [[1, 0.5], [1, 0.5], [1, 0.5], [1, 2.5]], rtol=0.02)


def test_the_table_of_layers() -> None:
    rows = of(record(1, [[4, 0, 1, 3], [2, 2, 2, 2]]), record(3, [[8, 0, 0, 0], [1, 1, 1, 5]], steps=2)).rows()
    assert rows == [("1", "3.00", "4.00 (steps 2 to 3)", "0", "1"), ("3", "1.75", "2.50 (steps 2 to 3)", "3", "0")]
    assert Loads().rows() == []
