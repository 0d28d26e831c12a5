"""The events that side outputs become."""

from __future__ import annotations

from typing import Any

import torch

from surogate_core.events import BlockFigures, RoutingStats
from surogate_core.train.sides import side_events


def test_counts_and_a_term_are_statistics_of_routing() -> None:
    tokens_LE = torch.tensor([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    sides: dict[str, Any] = {
        "tokens": ("expert_tokens", tokens_LE),
        "balance": ("loss", torch.tensor([2.0, 4.0])),
        "entropy": ("figure", torch.tensor([1.0, 3.0])),
    }
    figures, routing = side_events(7, sides, micro_steps=2)
    assert figures == BlockFigures(step=7, figures={"entropy": 1.0})
    assert routing == RoutingStats(step=7, imbalance=3.0, utilization=0.75, aux_loss=1.5)


def test_a_term_without_experts_is_a_figure() -> None:
    (event,) = side_events(3, {"penalty": ("loss", torch.tensor([2.0, 4.0]))}, micro_steps=1)
    assert event == BlockFigures(step=3, figures={"penalty": 3.0})
    assert not list(side_events(3, {}, micro_steps=1))
