"""Families with factors and offsets, as docs/model-family.md writes them, against transformers: Granite and Gemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GemmaConfig, GemmaForCausalLM, GraniteConfig, GraniteForCausalLM

from surogate_core.dsl import Attention, Embedding, LMHead, Param, Setting, Stack
from surogate_core.dsl.decoder import EPS, LAYERS, PREFIX, D, Decoder, DenseBlock, E, H, K, V
from surogate_core.kernels import ops
from surogate_testing.parity import TINY, TOLERANCE, ModelPair


class GraniteBlock(DenseBlock):
    """Both branches and the scores of attention have a factor."""

    residual = Setting("residual_multiplier")
    attend = Attention(H, K, E, scale=Setting("attention_multiplier"))

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        x = x + self.residual * self.attention(ops.rms_norm(x, self.input_norm, self.eps), tables)
        return x + self.residual * self.mlp(ops.rms_norm(x, self.post_norm, self.eps))


class Granite(Decoder):
    """The rows of the embedding are multiplied by a number of config.json, the logits divided by one."""

    embed = Embedding("model.embed_tokens.weight", V, D, scale=Setting("embedding_multiplier"))
    layers = Stack(GraniteBlock, LAYERS, PREFIX)
    head = replace(Decoder.head, scale=lambda config: 1 / config["logits_scaling"])


class GemmaBlock(DenseBlock):
    """Norms multiply by 1 + w, the feed-forward has GELU."""

    input_norm = Param("input_layernorm.weight", D, init="zeros")
    post_norm = Param("post_attention_layernorm.weight", D, init="zeros")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        x = x + self.attention(ops.rms_norm(x, self.input_norm, self.eps, offset=1.0), tables)
        return x + self.mlp(ops.rms_norm(x, self.post_norm, self.eps, offset=1.0))

    def mlp(self, h_ND: Tensor) -> Tensor:
        """[N, D] → [N, D]."""
        return self.down(torch.nn.functional.gelu(self.gate(h_ND), approximate="tanh") * self.up(h_ND))


class Gemma(Decoder):
    """The rows of the embedding are multiplied by √D, rounded to their dtype; the head has the rows themselves."""

    embed = Embedding("model.embed_tokens.weight", V, D, scale=lambda c: c["hidden_size"] ** 0.5, rounded=True)
    layers = Stack(GemmaBlock, LAYERS, PREFIX)
    head = LMHead(
        "lm_head.weight", "model.norm.weight", EPS, tied=Setting("tie_word_embeddings", default=True), offset=1.0
    )


GRANITE = {"embedding_multiplier": 5.5, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 7.0}


@pytest.mark.parametrize(
    ("architecture", "config", "build"),
    [
        (GraniteForCausalLM, GraniteConfig(**TINY, **GRANITE), Granite),
        (GemmaForCausalLM, GemmaConfig(**TINY, head_dim=16), Gemma),
    ],
    ids=["granite", "gemma"],
)
def test_logits_and_gradients_are_those_of_transformers(architecture: Any, config: Any, build: Any) -> None:
    pair = ModelPair.of(architecture, config, build)
    assert pair.logits_error() <= TOLERANCE
    error, name = pair.gradient_error(recompute=True)
    assert error <= TOLERANCE, name
