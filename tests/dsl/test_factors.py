"""Families with factors and offsets, as docs/model-family.md writes them, against transformers: Granite and Gemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from surogate_model_llama.model import EPS, D, E, H, K, Llama, LlamaBlock, V
from torch import Tensor
from transformers import GemmaConfig, GemmaForCausalLM, GraniteConfig, GraniteForCausalLM

from surogate_core.dsl import Attention, Dim, Embedding, LMHead, Param, Setting, Stack
from surogate_core.kernels import ops
from surogate_core.testing.parity import TINY, TOLERANCE, Pair


class GraniteBlock(LlamaBlock):
    """Both branches and the scores of attention have a factor."""

    residual = Setting("residual_multiplier")
    attend = Attention(H, K, E, scale=Setting("attention_multiplier"))

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        x = x + self.residual * self.o(_attended(self, ops.rms_norm(x, self.input_norm, self.eps), tables))
        h = ops.rms_norm(x, self.post_norm, self.eps)
        return x + self.residual * self.down(ops.swiglu(self.gate(h), self.up(h)))


class Granite(Llama):
    """The rows of the embedding are multiplied by a number of config.json, the logits divided by one."""

    embed = Embedding("model.embed_tokens.weight", V, D, scale=Setting("embedding_multiplier"))
    layers = Stack(GraniteBlock, Dim("num_hidden_layers"), "model.layers.{i}.")
    head = replace(Llama.head, scale=lambda config: 1 / config["logits_scaling"])


class GemmaBlock(LlamaBlock):
    """Norms multiply by 1 + w, the feed-forward has GELU."""

    input_norm = Param("input_layernorm.weight", D, init="zeros")
    post_norm = Param("post_attention_layernorm.weight", D, init="zeros")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        h = ops.rms_norm(x, self.input_norm, self.eps, offset=1.0)
        x = x + self.o(_attended(self, h, tables))
        h = ops.rms_norm(x, self.post_norm, self.eps, offset=1.0)
        return x + self.down(torch.nn.functional.gelu(self.gate(h), approximate="tanh") * self.up(h))


class Gemma(Llama):
    """The rows of the embedding are multiplied by √D, rounded to their dtype; the head has the rows themselves."""

    embed = Embedding("model.embed_tokens.weight", V, D, scale=lambda c: c["hidden_size"] ** 0.5, rounded=True)
    layers = Stack(GemmaBlock, Dim("num_hidden_layers"), "model.layers.{i}.")
    head = LMHead(
        "lm_head.weight", "model.norm.weight", EPS, tied=Setting("tie_word_embeddings", default=True), offset=1.0
    )


def _attended(block: Any, h: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
    cos, sin = tables["cos"], tables["sin"]
    q_NHE = ops.rope(block.q(h).view(-1, block.heads, block.head_dim), cos, sin)
    k_NKE = ops.rope(block.k(h).view(-1, block.kv_heads, block.head_dim), cos, sin)
    v_NKE = block.v(h).view(-1, block.kv_heads, block.head_dim)
    attended: Tensor = block.attend(q_NHE, k_NKE, v_NKE).flatten(1)
    return attended


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
    pair = Pair.of(architecture, config, build)
    assert pair.logits_error() <= TOLERANCE
    error, name = pair.gradient_error(recompute=True)
    assert error <= TOLERANCE, name
