"""The loads of experts: columns whose number is bounded, what the script draws, and pictures without it."""

from __future__ import annotations

import base64
import io
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from surogate_core.report import heat, html
from surogate_core.report.loads import CELLS, COLUMNS, FEWEST, SHOWN, Loads
from surogate_core.report.records import RunRecord


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


def pixels(figure: str) -> np.ndarray:
    """The picture in a figure."""
    (found,) = re.findall(r'href="data:image/png;base64,([^"]+)"', figure)
    image = Image.open(io.BytesIO(base64.b64decode(found)))
    assert image.mode == "RGBA"
    return np.asarray(image)


def test_pictures_show_the_loads_without_a_script() -> None:
    found = of(record(1, [[16, 0, 0, 0], [2, 2, 2, 2]]), record(4, [[16, 0, 0, 0], [1, 2, 2, 3]], steps=3))
    layers, experts = (pixels(figure) for figure in heat.figures(found))
    assert experts.shape == (4, heat.ACROSS, 4)
    assert "layer 1" in heat.figures(found)[1], "the layer that is least even"
    high, none = ([int(heat.palette.HEAT[name][i : i + 2], 16) for i in (1, 3, 5)] for name in ("high", "none"))
    assert experts[0, 0, :3].tolist() == high
    assert experts[1, 0].tolist() == [*none, 255]
    assert layers[0, 0, 3] == 255
    assert layers[1, 0, 3] < 64 < layers[0, -1, 3]
    quarter = heat.ACROSS // 4
    assert (layers[1, : quarter - 1, 3] < layers[1, quarter + 1 :, 3].min()).all(), "columns are as wide as their steps"
    assert heat.figures(Loads()) == []


def test_the_report_of_a_run_with_experts() -> None:
    run = RunRecord(directory=Path("run"), name="run")
    run.add({"event": "run_start", "steps": 2, "parameters": 10, "active_parameters": 5})
    for at in (1, 2):
        run.add(
            {
                "event": "routing_stats",
                "step": at,
                "moe_load_imbalance": 2.5,
                "moe_expert_utilization": 0.5,
                "moe_experts": 4,
            }
        )
        run.add({"event": "step_end", "step": at, "loss": 2.0})
    run.add(record(2, [[16, 0, 0, 0], [2, 2, 2, 2]], steps=2))
    page = html.render([run])
    assert page.count("data:image/png") == 2
    assert "Experts used (% in a step)" in page
    assert "<td>4 a layer</td>" in page
    assert "Dead experts" not in page.partition("<script")[0]
    assert '"cells":"' in page
    assert "experts without a token" in page
    both = html.render([run, run])
    assert "data:image/png" not in both
    assert '"experts":null' in both
    run.drop_after(0)
    assert run.loads.columns == ()
    assert not len(run.curve("moe_load_imbalance")[0])
