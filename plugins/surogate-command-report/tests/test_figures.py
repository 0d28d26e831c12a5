"""The arithmetic of the charts, run by node: readout, axes, pinch. Skipped where node is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from typing import Any

import pytest

NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")


def evaluate(*expressions: str, **names: Any) -> list[Any]:
    """The values of the expressions, in which the functions of figures.js and `names` are known."""
    assert NODE is not None
    script = resources.files("surogate_command_report.page").joinpath("figures.js").read_text(encoding="utf-8")
    given = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in names.items())
    script += f"{given}process.stdout.write(JSON.stringify([{', '.join(expressions)}]));"
    found = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, check=True, timeout=60)
    values: list[Any] = json.loads(found.stdout)
    return values


def test_a_readout_says_at_which_step_a_value_was_measured() -> None:
    steps = [10, 20, 30]
    line = {
        "name": "", "style": 0, "xs": steps, "steps": steps, "values": [1.0, None, 3.0], "means": None, "dots": False,
    }  # fmt: skip
    means = {**line, "means": [1.0, None, 2.0]}
    dots = {**line, "name": "eval", "xs": [0, 30], "steps": [0, 30], "values": [9.0, 4.0], "dots": True}
    # Over tokens: 100 at each step.
    tokens = {**line, "name": "b", "xs": [500, 1200], "steps": [5, 12], "values": [7.0, 8.0]}
    assert evaluate(
        "brief(readout([line, dots], 13))", "brief(readout([line], 21))", "brief(readout([means], 29))",
        "brief(readout([tokens], 1100))", "brief(readout([line], 99))", "readout([dots], 1)[0].step",
        line=line, dots=dots, means=means, tokens=tokens,
    ) == [
        "step 10: 1 · eval 9 at 0",
        "step 20: not finite",
        "step 30: 3 (mean 2)",
        "step 12: b 8",
        "",
        0,
    ]  # fmt: skip


def test_a_step_has_a_place_on_every_axis() -> None:
    axes = {"step": [0, 10, 20], "tokens": [0, 1000, 3000], "time": [0, 5, 6]}
    assert evaluate(
        "[0, 5, 10, 15, 20, 25].map(s => along(axes, 'tokens', s))",
        "[5, 25].map(s => along(axes, 'step', s))",
        "along({step: [], tokens: [], time: []}, 'time', 3)",
        "[axisUnit('time', 90)[0], axisUnit('time', 900)[0], axisUnit('time', 9000), axisUnit('tokens', 9e9)]",
        axes=axes,
    ) == [
        [0, 500, 1000, 2000, 3000, 3000],
        [5, 25],
        3,
        ["seconds", "minutes", ["hours", 3600], ["tokens", 1]],
    ]


def test_a_pinch_keeps_the_steps_under_the_fingers() -> None:
    out, aside, whole, crossed, point = evaluate(
        "pinched([40, 60], [0.3, 0.7], [0, 100])",
        "pinched([0, 50], [0.5, 0.999], [0, 100])",
        "pinched([20, 80], [0.45, 0.55], [0, 100])",
        "pinched([40, 60], [0.7, 0.3], [0, 100])",
        "pinched([50, 50.01], [0, 1], [0, 100])",
    )
    assert out == pytest.approx([25, 75])
    assert aside is None
    assert whole is crossed is None
    assert point == pytest.approx([50, 52])
