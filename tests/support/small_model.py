"""A model whose blocks are traced quickly, for tests of what happens in linear slots."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from surogate_core.dsl import Block, Dim, Embedding, Linear, LMHead, Model, Param, Setting, Stack
from surogate_core.kernels import ops

EPS = Setting("rms_norm_eps", default=1e-6)


class _Block(Block):
    eps = EPS
    norm = Param("norm.weight", Dim("hidden_size"))
    up = Linear("up_proj", Dim("hidden_size"), Dim("intermediate_size"), group="ffn")
    down = Linear("down_proj", Dim("intermediate_size"), Dim("hidden_size"), group="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        return x + self.down(torch.relu(self.up(ops.rms_norm(x, self.norm, self.eps))))


class SmallModel(Model):
    """Blocks of two projections without attention."""

    architecture = "Small"
    embed = Embedding("model.embed_tokens.weight", Dim("vocab_size"), Dim("hidden_size"))
    layers = Stack(_Block, Dim("num_hidden_layers"), "model.layers.{i}.")
    head = LMHead("lm_head.weight", "model.norm.weight", EPS, tied=Setting("tie_word_embeddings", default=True))


SMALL_CONFIG = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
