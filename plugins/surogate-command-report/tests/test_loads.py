"""The loads of experts as pictures without the page's script, and in the report."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from surogate_command_report import heat, html

from surogate_core.service.files import Loads, RunRecord


def record(step: int, tokens: Any, *, steps: int = 1, layers: Any = (1, 3)) -> dict[str, Any]:
    return {"event": "expert_loads", "step": step, "steps": steps, "layers": layers, "tokens": tokens}


def of(*records: dict[str, Any]) -> Loads:
    found = Loads()
    for one in records:
        found.add(one)
    return found


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
