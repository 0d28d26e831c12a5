"""The tensors of experts by their names in files."""

from __future__ import annotations

import torch
from mixture import CONFIG, Mixture

from surogate_core.dsl.experts import expanded, split


def test_names_in_files() -> None:
    assert expanded("a.{e}.b.weight", (2, 3, 4)) == {"a.0.b.weight": (3, 4), "a.1.b.weight": (3, 4)}
    assert expanded("a.weight", (3, 4)) == {"a.weight": (3, 4)}


def test_the_tensors_of_experts_are_the_rows_of_the_one_of_all() -> None:
    value = torch.arange(24.0).view(2, 3, 4)
    found = dict(split("a.{e}.b.weight", value))
    assert list(found) == list(expanded("a.{e}.b.weight", value.shape))
    assert torch.equal(found["a.1.b.weight"], value[1])


def test_a_fused_tensor_holds_the_projections_of_each_expert_in_turn() -> None:
    fused = Mixture(CONFIG).fused_tensors()
    assert list(fused) == ["layers.1.experts.gate_up_proj", "layers.1.experts.down_proj"]
    both, down = fused.values()
    assert both.shape == (6, 48, 32)
    assert down.shape == (6, 32, 24)
    assert [name for name, _ in both.parts[:3]] == [
        "layers.1.experts.0.gate_proj.weight",
        "layers.1.experts.0.up_proj.weight",
        "layers.1.experts.1.gate_proj.weight",
    ]
    assert {shape for _, shape in both.parts} == {(24, 32)}
