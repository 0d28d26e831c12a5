"""Qwen3, dense (arXiv 2505.09388): pre-norm blocks, grouped queries with q/k norms, SwiGLU.

Shape suffixes: N tokens, D model features, H query heads, K key/value heads, E head features,
F feed-forward features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl import Attention, Block, Dim, Embedding, Linear, LMHead, Model, Param, Setting, Stack
from surogate_core.dsl.decoder import check_decoder
from surogate_core.dsl.rope import Rope
from surogate_core.kernels import ops

D = Dim("hidden_size")
H = Dim("num_attention_heads")
K = Dim("num_key_value_heads")
E = Dim("head_dim", default=128)  # transformers' default, whatever the width
F = Dim("intermediate_size")
V = Dim("vocab_size")
BIAS = Setting("attention_bias", default=False)
EPS = Setting("rms_norm_eps", default=1e-6)
READS = ("attention_bias", "sliding_window")  # the window acts with use_sliding_window, which is refused
COMPUTES = {"qk_norm": True, "use_qk_norm": True}


class Qwen3Block(Block):
    """One decoder layer."""

    heads, kv_heads, head_dim, eps = H, K, E, EPS
    input_norm = Param("input_layernorm.weight", D)
    q_norm = Param("self_attn.q_norm.weight", E)
    k_norm = Param("self_attn.k_norm.weight", E)
    post_norm = Param("post_attention_layernorm.weight", D)
    q = Linear("self_attn.q_proj", D, H * E, region="qkv", bias=BIAS)
    k = Linear("self_attn.k_proj", D, K * E, region="qkv", bias=BIAS)
    v = Linear("self_attn.v_proj", D, K * E, region="qkv", bias=BIAS)
    o = Linear("self_attn.o_proj", H * E, D, region="att", bias=BIAS)
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
        q_NHE, k_NKE, v_NKE = ops.norm_rope(q_NHE, k_NKE, v_NKE, self.q_norm, self.k_norm, self.eps, cos, sin)
        a_NHE = self.attend(q_NHE, k_NKE, v_NKE)
        x = x + self.o(a_NHE.flatten(1))
        h = ops.rms_norm(x, self.post_norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class Qwen3(Model):
    """The causal language model."""

    architecture = "Qwen3ForCausalLM"
    embed = Embedding("model.embed_tokens.weight", V, D)
    layers = Stack(Qwen3Block, Dim("num_hidden_layers"), "model.layers.{i}.")
    head = LMHead("lm_head.weight", "model.norm.weight", EPS, tied=Setting("tie_word_embeddings", default=False))

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin, [N, E/2] fp32."""
        return Rope(self.config, E.size(self.config)).tables(positions_N)


def build(config: Mapping[str, Any]) -> Qwen3:
    """The model of a ``config.json``; refuses what the block does not compute."""
    model = Qwen3(config)
    check_decoder(model, family="qwen3", heads=H, kv_heads=K, head_dim=E, reads=READS, computes=COMPUTES)
    return model
