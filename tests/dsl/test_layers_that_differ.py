"""A model whose layers differ by a key of `config.json`, as docs/model-family.md shows it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl import Dim, Model, Stack
from surogate_core.dsl.rope import Rope
from surogate_core.kernels import ops
from surogate_testing import tiny

torch.set_num_threads(1)


class Unrotated(tiny.TinyBlock):
    """Attention without positions."""


class Rotated(tiny.TinyBlock):
    """The same with rotated queries and keys."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        h = ops.rms_norm(x, self.norm, self.eps)
        heads = (len(h), self.heads, -1)
        q, k = (ops.rope(made.view(heads), tables["cos"], tables["sin"]) for made in (self.q(h), self.k(h)))
        a = self.attend(q, k, self.v(h).view(heads))
        x = x + self.o(a.flatten(1))
        h = ops.rms_norm(x, self.norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class Base(tiny.TinyModel):
    """Everything but the layers."""

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return Rope(self.config, 8).tables(positions_N)


def build(config: Mapping[str, Any]) -> Model:
    """The model whose layers `no_rope_layers` lists: 1 with the rotary embedding, 0 without."""
    kinds = [Rotated if rotated else Unrotated for rotated in config["no_rope_layers"]]
    runs = [(kind, len(list(members))) for kind, members in groupby(kinds)]
    stacks = tuple(Stack(kind, Dim("_layers", default=count), "layers.{i}.") for kind, count in runs)
    made: type[Model] = type("Mixed", (Base,), {"layers": stacks})
    return made(config)


def test_layers_follow_the_key_and_train() -> None:
    layers = [1, 1, 0, 1]
    config = {**tiny.CONFIG, "no_rope_layers": layers, "num_hidden_layers": 4}
    found = [(prefix, type(block)) for prefix, block in build(config).blocks(8)]
    assert found == [(f"layers.{n}.", Rotated if kind else Unrotated) for n, kind in enumerate(layers)]
    losses = tiny.train(tiny.engine(config=config, build=build), 4, lr=0.1, same=True)
    assert losses[-1] < losses[0]
    other = tiny.engine(config={**config, "no_rope_layers": [0, 0, 0, 0]}, build=build)
    assert tiny.train(other, 1, lr=0.1, same=True)[0] != losses[0]
