"""The commands that are named at a run's end: only those that work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surogate_core.config.schema import ModelSelection, RunConfig
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
