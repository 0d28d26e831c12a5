"""Qwen2 and Qwen2.5, dense (arXiv 2412.15115): pre-norm blocks, grouped queries, biases on q, k and v, SwiGLU.

Shape suffixes: N tokens, D model features, H query heads, K key/value heads, E head features,
F feed-forward features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl import Attention, Block, Dim, Embedding, Linear, LMHead, Model, Param, Setting, Stack
from surogate_core.dsl.decoder import check_decoder, even_share
from surogate_core.dsl.rope import Rope
from surogate_core.kernels import ops

D = Dim("hidden_size")
H = Dim("num_attention_heads")
K = Dim("num_key_value_heads")
E = Dim("head_dim", default=even_share)
F = Dim("intermediate_size")
V = Dim("vocab_size")
EPS = Setting("rms_norm_eps", default=1e-6)
# The window acts with use_sliding_window, which is refused. The biases of q, k and v are there whatever a file says.
READS = ("sliding_window", "attention_bias", "qkv_bias")


class Qwen2Block(Block):
    """One decoder layer."""

    heads, kv_heads, head_dim, eps = H, K, E, EPS
    input_norm = Param("input_layernorm.weight", D)
    post_norm = Param("post_attention_layernorm.weight", D)
    q = Linear("self_attn.q_proj", D, H * E, region="qkv", bias=True)
    k = Linear("self_attn.k_proj", D, K * E, region="qkv", bias=True)
    v = Linear("self_attn.v_proj", D, K * E, region="qkv", bias=True)
    o = Linear("self_attn.o_proj", H * E, D, region="att")
    attend = Attention(H, K, E)
    gate = Linear("mlp.gate_proj", D, F, region="ffn")
    up = Linear("mlp.up_proj", D, F, region="ffn")
    down = Linear("mlp.down_proj", F, D, region="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        cos, sin = tables["cos"], tables["sin"]
        h = ops.rms_norm(x, self.input_norm, self.eps)
        q_NHE = self.q(h).view(-1, self.heads, self.head_dim)
        k_NKE = self.k(h).view(-1, self.kv_heads, self.head_dim)
        v_NKE = self.v(h).view(-1, self.kv_heads, self.head_dim)
        a_NHE = self.attend(ops.rope(q_NHE, cos, sin), ops.rope(k_NKE, cos, sin), v_NKE)
        x = x + self.o(a_NHE.flatten(1))
        h = ops.rms_norm(x, self.post_norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class Qwen2(Model):
    """The causal language model."""

    architecture = "Qwen2ForCausalLM"
    embed = Embedding("model.embed_tokens.weight", V, D)
    layers = Stack(Qwen2Block, Dim("num_hidden_layers"), "model.layers.{i}.")
    head = LMHead("lm_head.weight", "model.norm.weight", EPS, tied=Setting("tie_word_embeddings", default=False))

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin, [N, E/2] fp32."""
        return Rope(self.config, E.size(self.config)).tables(positions_N)


def build(config: Mapping[str, Any]) -> Qwen2:
    """The model of a ``config.json``; refuses what the block does not compute."""
    model = Qwen2(config)
    check_decoder(model, family="qwen2", heads=H, kv_heads=K, head_dim=E, reads=READS)
    return model
