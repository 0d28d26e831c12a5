"""A toy family whose layers take what earlier ones give: an input of each layer, and keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl import Attention, Block, Dim, Given, Linear, LMHead, Param, Received, Setting
from surogate_core.dsl.rope import Rope
from surogate_core.kernels import ops
from surogate_testing import tiny

D, H, E, P = Dim("hidden_size"), Dim("num_attention_heads"), Dim("head_dim"), Dim("input_size")
LAYERS, V = Dim("num_hidden_layers"), Dim("vocab_size")
CONFIG: Mapping[str, Any] = {
    "model_type": "toy_relaying",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "input_size": 6,
    "window": 5,
}


class Inputs(Block):
    """The inputs of all layers, from the tokens and their embedding."""

    reads_ids = True
    table = Param("inputs.weight", V, LAYERS * P, role="embedding", init="normal")
    project = Linear("projection", D, LAYERS * P, region="ffn")
    inputs = Given(P, count=LAYERS)
    sizes = LAYERS, P

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        rows = torch.nn.functional.embedding(tables["input_ids"], self.table) + self.project(x)
        self.inputs(rows.unflatten(1, (-1, P.size(self.config))))
        return x


class Own(Block):
    """A layer with keys and values of its own, and a gate of its input."""

    heads, head_dim, eps = H, E, Setting("rms_norm_eps", default=1e-6)
    norm = Param("norm.weight", D)
    q = Linear("q_proj", D, H * E, region="qkv")
    k = Linear("k_proj", D, E, region="qkv")
    v = Linear("v_proj", D, E, region="qkv")
    o = Linear("o_proj", H * E, D, region="att")
    gate = Linear("gate_proj", D, P, region="ffn")
    down = Linear("down_proj", P, D, region="ffn")
    attend = Attention(H, 1, E, window=Setting("layer_window"), lends=True)
    own = Received(P)

    def mixed(self, q_NHE: Tensor, h_ND: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, H, E]."""
        k, v = (product(h_ND).unflatten(1, (1, -1)) for product in (self.k, self.v))
        return self.attend(q_NHE, ops.rope(k, tables["cos"], tables["sin"]), v)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        h = ops.rms_norm(x, self.norm, self.eps)
        q = ops.rope(self.q(h).unflatten(1, (self.heads, -1)), tables["cos"], tables["sin"])
        x = x + self.o(self.mixed(q, h, tables).flatten(1))
        return x + self.down(self.gate(x).sigmoid() * self.own)


class Borrowing(Own):
    """A layer with the keys and values of an earlier one."""

    k = v = None
    attend = Attention(H, 1, E, window=Setting("layer_window"), borrows=True)

    def mixed(self, q_NHE: Tensor, h_ND: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, H, E]."""
        return self.attend(q_NHE)


class Relaying(tiny.TinyModel):
    """Two layers with a window, of which the second borrows, and two without."""

    architecture = "ToyRelayingForCausalLM"
    head = LMHead("head.weight", "final.weight", Own.eps)

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin."""
        return Rope(self.config, E.size(self.config)).tables(positions_N)

    def source(self, number: int, name: str) -> tuple[int, str]:
        """Layers 3 and 4 borrow of 1 and 2."""
        return (0, f"inputs.{number - 1}") if name == "own" else (number - 2, name)

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        """What makes the inputs, and the layers."""
        yield "", Inputs(self.config, max_seqlen)
        for number in range(4):
            config = {**self.config, "layer_window": 0 if number % 2 else self.config["window"]}
            yield f"layers.{number}.", (Own if number < 2 else Borrowing)(config, max_seqlen)


def engine(**changes: Any) -> Any:
    """A tiny engine of the family."""
    return tiny.engine(CONFIG, build=Relaying, **changes)
