"""What follows from the parts of a run together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from surogate_core.engine.planning.assembly import LAUNCHED_TOKENS, Assembly
from surogate_testing import tiny


def assembly(*, tokens: int = LAUNCHED_TOKENS, lora: bool = True, device: str = "cuda", **changes: Any) -> Assembly:
    """A run on four GPUs that share out experts in pairs; its parts do not have to fit each other."""
    made = tiny.assembly(tiny.CONFIG, ranks=4, lora=tiny.lora() if lora else None, **changes)
    settings = replace(
        made.settings,
        device=torch.device(device),
        cuda_graphs=True,
        tokens=tokens,
        axes=replace(made.settings.axes, expert=2),
    )
    return replace(made, settings=settings)


def test_a_gpu_replays_graphs_but_not_of_long_halves_that_travel() -> None:
    assert not assembly().captured
    assert assembly(tokens=LAUNCHED_TOKENS - 1).captured
    assert assembly(lora=False).captured
    assert not assembly(tokens=1, device="cpu").captured
    alone = assembly()
    assert replace(alone, settings=replace(alone.settings, axes=replace(alone.settings.axes, expert=1))).captured


@pytest.mark.parametrize("rows", [False, True])
def test_halves_travel_to_frozen_experts_whose_sums_come_back(rows: bool) -> None:
    made = assembly()
    made = replace(made, settings=replace(made.settings, axes=replace(made.settings.axes, expert_rows=rows)))
    assert made.exchanges_halves != rows
    assert not assembly(lora=False).exchanges_halves


def test_rows_whose_scale_is_that_of_all_travel_together() -> None:
    """Those of fp8-hybrid have scales of their own where they are multiplied as codes."""

    class Rounded(tiny.PlainProduct):
        def grouped(self, *arguments: Any) -> Any:
            raise NotImplementedError

    class Coded(Rounded):
        def expert_codes(self, *arguments: Any) -> Any:
            raise NotImplementedError

    assert not assembly(recipe=Rounded()).exchanges_halves
    assert assembly(recipe=Rounded()).captured
    assert assembly(recipe=Coded()).exchanges_halves
