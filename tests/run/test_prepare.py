"""Notes of a run before it begins."""

from __future__ import annotations

import pytest

from surogate_core.config.schema import RunConfig
from surogate_core.run.prepare import _lora_notes


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        (RunConfig(lora=False), []),
        (RunConfig(lora_expert_rank=4, train_router=True), []),
        (
            RunConfig(lora=False, lora_expert_rank=4, train_router=True, lora_target_modules=["experts"]),
            ["lora_target_modules, lora_expert_rank, train_router: no effect with lora=false."],
        ),
    ],
)
def test_keys_of_lora_without_lora_are_noted(config: RunConfig, notes: list[str]) -> None:
    assert _lora_notes(config) == notes
