"""benchmarks/optimizer_training.py: means and their errors, its table and its picture."""

from __future__ import annotations

import math
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import optimizer_training
import pytest
from optimizer_training import OPTIMIZERS, Setting

SETTING = Setting(tiny=True, device="cpu", seeds=(1, 2))
LAST = {"adamw": (2.0, 4.0), "adamw_8bit": (2.2, 4.4), "normuon": (1.0, 2.0)}


def runs() -> dict[tuple[str, int], Any]:
    return {
        (name, seed): {
            "rate": 0.5,
            "sweep": [(0.5, 1.25), (0.7, 1.5)],
            "held": [(0, 9.0), (100, 5.0), (200, LAST[name][i])],
        }
        for name in OPTIMIZERS.rates
        for i, seed in enumerate(SETTING.seeds)
    }


def test_a_mean_has_the_standard_error_of_its_values() -> None:
    mean, error = optimizer_training.mean_and_error([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert error == pytest.approx(1 / math.sqrt(3))
    assert math.isnan(optimizer_training.mean_and_error([1.0])[1])


def test_the_table_compares_seed_by_seed() -> None:
    lines = optimizer_training.markdown(OPTIMIZERS, runs(), SETTING, "title").splitlines()
    assert "| `adamw` | 0.5 | 2.0000, 4.0000 | 3.0000 ± 1.0000 |  |" in lines
    assert "| `adamw_8bit` | 0.5 | 2.2000, 4.4000 | 3.3000 ± 1.1000 | +10.00 ± 0.00 % |" in lines
    assert "| `normuon` | 0.5 | 1.0000, 2.0000 | 1.5000 ± 0.5000 | -50.00 ± 0.00 % |" in lines
    assert "adamw 0.5: 1.2500, 0.7: 1.5000; normuon 0.5" in lines[-1]


def test_a_run_that_is_missing_leaves_its_optimizer_out() -> None:
    found = runs()
    del found["normuon", 2]
    assert "normuon" not in optimizer_training.markdown(OPTIMIZERS, found, SETTING, "title").partition("Sweep")[0]


def test_the_picture_has_a_curve_for_each_optimizer() -> None:
    root = ElementTree.fromstring(optimizer_training.picture(OPTIMIZERS, runs(), SETTING))
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(lines) == 2 * len(OPTIMIZERS.rates)


@pytest.mark.slow
def test_every_optimizer_trains_on_a_cpu(tmp_path: Path) -> None:
    words = "--tiny --device cpu --rows 2 --length 128 --vocabulary 512 --steps 4 --sweep-steps 2 --held-rows 4"
    command = [sys.executable, optimizer_training.__file__, "--out", str(tmp_path), *words.split()]
    subprocess.run([*command, "--megabytes", "2", "--evaluate", "2", "--seeds", "1", "2"], check=True)
    table = (tmp_path / "optimizer_training.md").read_text()
    assert all(f"| `{name}` |" in table for name in OPTIMIZERS.rates)
