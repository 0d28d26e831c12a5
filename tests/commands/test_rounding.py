"""How operands are rounded, by layer, part and role, on a small model with a dense and a sparse layer."""

from __future__ import annotations

from typing import Any

import mixture
import pytest
import torch
from surogate_command_numerics.rounding import DENSE, EXPERTS, QUIET, ROLES, RoundingRecord, Roundings, rounding_of
from surogate_quant_nf4 import NF4Options
from surogate_quant_nf4.nf4 import NF4
from torch import Tensor

from surogate_core.bundles import WeightFormat
from surogate_testing import tiny, weight_formats


class Halves(WeightFormat):
    """Keeps fp32 weights in bf16."""

    name = "halves"

    def pack(self, weight_OI: Tensor) -> Tensor:
        return weight_OI.bfloat16().view(torch.uint8)

    def unpack(self, packed: Tensor, room_OI: Tensor) -> None:
        room_OI.copy_(packed.view(torch.bfloat16))


def zeros(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)


def a_half(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
    """Loses half of each value, and clips those of gradients."""
    return x / 2, torch.full_like(x, role == "gradient", dtype=torch.bool)


def found(roundings: dict[str, Roundings], **settings: Any) -> dict[tuple[str, int, str, str], tuple[float, ...]]:
    made = tiny.engine(mixture.CONFIG, build=mixture.Mixture, **settings)
    rows = rounding_of(made, tiny.batches(0)[0], roundings)
    return {(r.recipe, r.layer, r.part, r.role): (r.error, r.to_zero, r.saturated) for r in rows}


@pytest.mark.parametrize("lora", [False, True])
def test_each_part_of_a_layer_is_measured(lora: bool) -> None:
    settings = {"lora": tiny.lora()} if lora else {}
    rows = found({"none": Roundings(dense=zeros, experts=a_half), "dense": Roundings(dense=zeros)}, **settings)
    # Values that are 0 already do not become 0.
    rows = {key: (error, float(zeros > 0.5), clipped) for key, (error, zeros, clipped) in rows.items()}
    dense = {("none", 0, DENSE, role): (1.0, 1.0, 1.0) for role in ROLES}
    sparse = {
        ("none", 1, part, role): (0.5, 0.0, float(role == "gradient")) for part in (EXPERTS, QUIET) for role in ROLES
    }
    assert rows == dense | sparse | {("dense", *key[1:]): figures for key, figures in dense.items()}


def test_a_weight_format_rounds_weights_alone() -> None:
    rows = found({"halves": Roundings.of_format(Halves())})
    assert {key[1:] for key in rows} == {(0, DENSE, "weight"), (1, EXPERTS, "weight"), (1, QUIET, "weight")}
    assert all(0 < error < 2**-8 and clipped == 0 for error, _, clipped in rows.values())


def test_a_base_in_a_weight_format_is_measured_like_the_values_that_it_has() -> None:
    """Its layers share a workspace, which the backward of all of them reads."""
    roundings = {"none": Roundings(dense=a_half, experts=a_half), "some": Roundings.of_format(Halves())}
    config = {**mixture.CONFIG, "num_hidden_layers": 3}
    engines = [
        tiny.engine(config, build=mixture.Mixture, lora=tiny.lora(), weight_format=NF4(NF4Options())),
        tiny.engine(
            config,
            build=mixture.Mixture,
            lora=tiny.lora(),
            source=weight_formats.rounded(NF4(NF4Options()), tiny.random_source()),
        ),
    ]
    packed, plain = (rounding_of(made, tiny.batches(0)[0], roundings) for made in engines)
    assert packed == plain


def test_the_quiet_experts_are_those_with_fewest_tokens() -> None:
    def one_row(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
        """Loses the first row, or the first expert."""
        near = x.clone()
        near[0] = 0
        return near, torch.zeros_like(x, dtype=torch.bool)

    def quiet(*loads: int) -> dict[str, float]:
        record = RoundingRecord({"one": Roundings(experts=one_row)})
        x_RI, weights_EOI = torch.ones(sum(loads), 3, requires_grad=True), torch.ones(4, 2, 3)
        (y_RO,) = record.grouped(x_RI, [weights_EOI], torch.tensor(loads).cumsum(0).int(), [])
        y_RO.sum().backward()
        record.layer = 1
        return {r.role: r.error for r in record.results() if r.part == QUIET}

    alone = {"activation": 1.0, "weight": 1.0, "gradient": 1.0}
    assert quiet(1, 5, 3, 2) == alone
    assert quiet(2, 5, 1, 3) == dict.fromkeys(alone, 0.0)
    assert quiet(1, 1, 1, 1) == alone, "of equals the first"
    assert quiet(3, 0, 3, 3) == {"weight": 0.0}, "an expert without rows has weights only"
