"""The commands that are named at a run's end: only those that work."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from surogate_core.config.schema import ModelSelection, RunConfig, Selection
from surogate_core.run.next_commands import next_commands

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
    monkeypatch.setattr("surogate_core.run.next_commands.command_names", lambda: ["chat", "plugins lock"])
    assert [purpose for purpose, _ in next_commands(replace(SCRATCH, lora=False))] == ["try it", "serve (vLLM)"]
