"""What a run says beside its figures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from surogate_core.config.schema import ModelSelection, RunConfig, Selection
from surogate_core.plugins import load_plugins
from surogate_core.run.notes import next_commands, rate_note, untested_torch

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


def test_a_torch_beyond_the_tested_ones_is_said():
    for known in ("2.11.0", "2.13.0+cpu", "2.13.2+cu130", "1.9.1"):
        assert untested_torch(known) == []
    for new in ("2.14.0+cpu", "2.15.0a0+git12", "3.0.0"):
        assert untested_torch(new) == [
            f"torch {new} is newer than 2.13, the newest that this version of Surogate was tested with."
        ]
    assert untested_torch() == []


SCRATCH = RunConfig(output_dir="runs/a", model=ModelSelection(preset="tiny"), from_scratch=True)


@pytest.mark.parametrize(
    ("config", "purposes"),
    [
        (SCRATCH, ["read the report"]),
        (replace(SCRATCH, model=ModelSelection(path="base")), ["read the report"]),
        (replace(SCRATCH, lora=False), ["try it", "read the report", "publish (private)", "serve (vLLM)"]),
        (
            replace(SCRATCH, model=ModelSelection(path="a/b"), from_scratch=False),
            ["fold the adapter in", "try it", "read the report", "publish (private)", "serve (vLLM)"],
        ),
    ],
)
def test_an_adapter_on_random_weights_cannot_be_loaded_again(config: RunConfig, purposes: list[str]) -> None:
    assert [purpose for purpose, _ in next_commands(config)] == purposes


def test_what_got_worse_is_neither_published_nor_served() -> None:
    purposes = [purpose for purpose, _ in next_commands(replace(SCRATCH, lora=False), worse=True)]
    assert purposes == ["read the report", "try it"]


def test_a_reward_model_is_measured_since_it_writes_no_text() -> None:
    commands = next_commands(replace(SCRATCH, lora=False), head="scores")
    assert commands[0] == ("measure it", "surogate eval runs/a datasets=pairs.jsonl")
    assert [purpose for purpose, _ in commands] == ["measure it", "read the report", "publish (private)"]
    adapter = replace(SCRATCH, model=ModelSelection(path="a/b"), from_scratch=False)
    assert "surogate merge" not in str(next_commands(adapter, head="scores")), "it refuses such an adapter"


@dataclass(frozen=True)
class Letters:
    length: int = 4
    text: str = "Copy"
    weights: dict[str, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (Letters(), "surogate env eval runs/a copy"),
        (Letters(length=3, text="Say it"), "surogate env eval runs/a copy length=3 'text=Say it'"),
        (Letters(weights={"exact": 1.0}), None),
    ],
)
def test_rewards_are_measured_in_the_environment_of_the_run(options: Letters, command: str | None) -> None:
    config = replace(SCRATCH, lora=False, environment=Selection(name="copy", options=options))
    assert dict(next_commands(config)).get("measure its rewards") == command


def test_only_installed_commands_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_core.run.notes.command_names", lambda: ["chat", "plugins lock"])
    assert [purpose for purpose, _ in next_commands(replace(SCRATCH, lora=False))] == ["try it", "serve (vLLM)"]
