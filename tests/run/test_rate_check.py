"""The warning about a learning rate far outside of what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from surogate_core.config.schema import RunConfig
from surogate_core.plugins import load_plugins
from surogate_core.run.rate_check import rate_note

ROOT = Path(__file__).resolve().parents[2]


def note(rate: float, **changes: Any) -> str | None:
    return rate_note(rate, **{"lora": True, "from_scratch": False, "optimizer": "adamw", "scale": 1.0, **changes})


@pytest.mark.parametrize(
    ("rate", "changes", "words"),
    [
        (50, {}, "far above what usually trains LoRA adapters with adamw (2e-05 to 0.001): the loss will probably"),
        (0, {}, "far below"),
        (1e-7, {}, "hardly anything will be learnt. Try learning_rate=0.0002."),
        (2e-3, {"lora": False}, "all weights of a trained model"),
        (0.1, {"lora": False, "from_scratch": True}, "a model from random weights"),
        (2, {"lora": False, "from_scratch": True, "scale": 10}, "(0.001 to 0.05)"),
    ],
)
def test_a_rate_far_outside_is_named(rate: float, changes: dict[str, Any], words: str) -> None:
    assert words in (note(rate, **changes) or "")


def test_a_usual_rate_says_nothing() -> None:
    for rate in (1e-5, 2e-4, 1e-3, 5e-3):
        assert note(rate) is None
    for rate in (5e-7, 1e-5, 2e-4, 5e-4):
        assert note(rate, lora=False) is None
    for rate in (3e-5, 3e-4, 3e-3, 2e-2):
        assert note(rate, lora=False, from_scratch=True) is None
    assert note(0.02, lora=False, scale=10, from_scratch=True) is None


def test_no_default_and_no_example_is_warned_about() -> None:
    optimizers = load_plugins().all("optimizer")
    assert note(RunConfig().learning_rate) is None
    files = [*ROOT.glob("examples/*.yaml"), *ROOT.glob("plugins/*/src/*/conf/model/*.yaml")]
    seen = 0
    for file in files:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        if "learning_rate" not in values:
            continue
        seen += 1
        name = values.get("optimizer", "adamw_8bit")
        scratch = bool(values.get("from_scratch")) or "plugins" in file.parts or values.get("task") == "pt"
        scale = optimizers[name].rate_scale
        changes = {"lora": values.get("lora", True), "from_scratch": scratch, "optimizer": name, "scale": scale}
        assert note(float(values["learning_rate"]), **changes) is None, file
    assert seen > 5
