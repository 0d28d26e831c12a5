"""The events that side outputs become."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from surogate_core.dsl.sides import RouterLosses
from surogate_core.events import BlockFigures, Event, ExpertLoads, RoutingStats
from surogate_core.train.sides import DEAD_STEPS, SideFigures, balance

UNEVEN = torch.tensor([[6.0, 2.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])


def one_step(sides: dict[str, Any], *, micro_steps: int = 1, losses: RouterLosses | None = None) -> list[Event]:
    return list(SideFigures({"tokens": [1, 3]}, losses=losses).events(7, sides, micro_steps))


def test_counts_become_statistics_of_routing() -> None:
    (found,) = one_step({"tokens": ("expert_tokens", UNEVEN)})
    assert isinstance(found, RoutingStats)
    assert (found.moe_load_imbalance, found.moe_worst_imbalance, found.moe_worst_layer) == (2.0, 3.0, 1)
    assert found.moe_expert_utilization == 0.75
    half = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert found.moe_entropy == pytest.approx((half + 1) / 2)
    assert found.moe_cv == pytest.approx(math.sqrt((16 + 0 + 4 + 4) / 4) / 2 / 2)
    assert (found.moe_dead_experts, found.moe_dropped) == (None, 0)
    assert (found.moe_aux_loss, found.moe_aux_loss_raw, found.moe_z_loss, found.moe_z_loss_raw) == (None,) * 4


def test_loads_of_gpus_are_means_over_layers_and_micro_batches() -> None:
    loads = ("rank_loads", torch.tensor([[3.0, 2.0, 0.5, 2.0], [5.0, 2.0, 0.7, 4.0]]))
    figures = SideFigures({"tokens": [1, 3]}, moved_bytes=12)
    (found,) = figures.events(7, {"tokens": ("expert_tokens", UNEVEN), "loads": loads}, 2)  # type: ignore[dict-item]
    assert isinstance(found, RoutingStats)
    assert (found.moe_rank_imbalance, found.moe_rank_imbalance_evened) == (2.0, 1.0)
    assert (found.moe_moved_rows, found.moe_moved_bytes) == (pytest.approx(0.3), 12)
    (alone,) = one_step({"tokens": ("expert_tokens", UNEVEN)})
    assert isinstance(alone, RoutingStats)
    assert (alone.moe_rank_imbalance, alone.moe_moved_bytes) == (None, None)


def test_figures_and_terms() -> None:
    entropy = ("figure", torch.tensor([1.0, 3.0]))
    penalty = ("loss", torch.tensor([2.0, 4.0]))
    figures, routing = one_step(
        {"tokens": ("expert_tokens", UNEVEN), "penalty": penalty, "entropy": entropy}, micro_steps=2
    )
    assert figures == BlockFigures(step=7, figures={"entropy": 1.0})
    assert isinstance(routing, RoutingStats)
    assert routing.moe_aux_loss_raw == 1.5
    assert one_step({"penalty": penalty}) == [BlockFigures(step=7, figures={"penalty": 3.0})]
    assert one_step({}) == []


def test_the_balance_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    torch.manual_seed(0)
    layers, tokens, experts, choices = 3, 50, 8, 2
    logits = [torch.randn(tokens, experts) for _ in range(layers)]
    expected = float(modeling.load_balancing_loss_func(tuple(logits), experts, choices))
    counts = torch.stack([torch.bincount(x.topk(choices).indices.flatten(), minlength=experts) for x in logits])
    probability = torch.stack([x.softmax(-1).sum(0) for x in logits])
    assert balance(counts, probability) == pytest.approx(expected, rel=1e-6)
    even = torch.full((layers, experts), tokens * choices / experts)
    assert balance(even, even / choices) == pytest.approx(choices)
    assert balance(even, even / choices, per_layer=True) == pytest.approx(layers)


def test_the_balance_is_given_before_and_after_its_coefficient() -> None:
    sides: dict[str, Any] = {
        "tokens": ("expert_tokens", UNEVEN),
        "probability": ("router_probability", torch.tensor([[3.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])),
        "z": ("router_z", torch.tensor([16.0, 8.0])),
        "mass": ("router_mass", torch.tensor([3.0, 1.0])),
    }
    (found,) = one_step(sides)
    assert isinstance(found, RoutingStats)
    assert found.moe_top_mass == 0.5
    assert found.moe_aux_loss_raw == pytest.approx(4 * (8 * 4 + 4 * 2 + 2 * 1 + 2 * 1) / 64)
    assert (found.moe_z_loss_raw, found.moe_aux_loss, found.moe_z_loss) == (3.0, None, None)
    (found,) = one_step(sides, losses=RouterLosses(form="layer"))
    assert isinstance(found, RoutingStats)
    assert found.moe_aux_loss_raw == pytest.approx(4 * (0.75**2 + 0.25**2) + 1)
    assert found.moe_z_loss_raw == 6.0
    terms: dict[str, Any] = {
        "aux": ("router_aux_loss", torch.tensor([0.75])),
        "z term": ("router_z_loss", torch.tensor([0.5])),
    }
    (found,) = one_step(sides | terms, losses=RouterLosses(aux=0.5, z=0.25))
    assert isinstance(found, RoutingStats)
    assert (found.moe_aux_loss, found.moe_aux_loss_raw) == (0.75, 1.5), "as the engine added it"
    assert (found.moe_z_loss, found.moe_z_loss_raw) == (0.5, 2.0)


def test_an_expert_is_dead_after_a_window_without_a_token() -> None:
    made = SideFigures({"tokens": [0, 1]})
    found = []
    for step in range(1, 2 * DEAD_STEPS + 2):
        tokens = UNEVEN.clone()
        tokens[0, 3] = float(step == DEAD_STEPS + 1)  # comes back once
        (event,) = made.events(step, {"tokens": ("expert_tokens", tokens)}, 1)
        assert isinstance(event, RoutingStats)
        found.append(event.moe_dead_experts)
    assert found == [None] * (DEAD_STEPS - 1) + [2] + [1] * DEAD_STEPS + [2]


def test_loads_are_summed_over_the_steps_of_a_record() -> None:
    made = SideFigures({"late": [5], "tokens": [1, 3]}, every=2)
    late = torch.tensor([[1.0, 7.0]])
    sides: dict[str, Any] = {"late": ("expert_tokens", late), "tokens": ("expert_tokens", UNEVEN)}
    records = [
        event
        for step in range(4, 8)
        for event in (*made.events(step, sides, 1), *(made.flush(step) if step > 5 else ()))
        if isinstance(event, ExpertLoads)
    ]
    assert [(r.step, r.steps) for r in records] == [(4, 1), (6, 2), (7, 1)]
    assert records[1].layers == (1, 3, 5)
    assert records[1].tokens == ((12, 4, 0, 0), (4, 4, 4, 4), (2, 14))


def test_the_first_router_that_breaks_is_named() -> None:
    figures = SideFigures({"tokens": [1, 3], "probability": [1, 3], "others": [2]})
    probability = torch.full((2, 4), 0.25)
    assert figures.broken_router({"probability": ("router_probability", probability)}) is None
    probability[1, 2] = math.nan
    sides: dict[str, Any] = {"tokens": ("expert_tokens", UNEVEN), "probability": ("router_probability", probability)}
    assert figures.broken_router(sides) == 3
    assert figures.broken_router({**sides, "others": ("router_probability", torch.full((1, 4), math.inf))}) == 2
