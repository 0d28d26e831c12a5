"""Qwen3, dense (arXiv 2505.09388): pre-norm blocks, grouped queries with q/k norms, SwiGLU.

Shape suffixes: N tokens, D model features, H query heads, K key/value heads, E head features,
F feed-forward features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl import Block, Dim, Embedding, Linear, LMHead, Model, Param, Setting, Stack
from surogate_core.errors import UserError
from surogate_core.kernels import ops

D = Dim("hidden_size")
H = Dim("num_attention_heads")
K = Dim("num_key_value_heads")
E = Dim("head_dim", default=128)  # transformers' default, whatever the width
F = Dim("intermediate_size")
V = Dim("vocab_size")
BIAS = Setting("attention_bias", default=False)
EPS = Setting("rms_norm_eps", default=1e-6)


class Qwen3Block(Block):
    """One decoder layer."""

    heads, kv_heads, head_dim, eps = H, K, E, EPS
    input_norm = Param("input_layernorm.weight", D)
    q_norm = Param("self_attn.q_norm.weight", E)
    k_norm = Param("self_attn.k_norm.weight", E)
    post_norm = Param("post_attention_layernorm.weight", D)
    q = Linear("self_attn.q_proj", D, H * E, group="qkv", bias=BIAS)
    k = Linear("self_attn.k_proj", D, K * E, group="qkv", bias=BIAS)
    v = Linear("self_attn.v_proj", D, K * E, group="qkv", bias=BIAS)
    o = Linear("self_attn.o_proj", H * E, D, group="att", bias=BIAS)
    gate = Linear("mlp.gate_proj", D, F, group="ffn")
    up = Linear("mlp.up_proj", D, F, group="ffn")
    down = Linear("mlp.down_proj", F, D, group="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        cos, sin = tables["cos"], tables["sin"]
        h = ops.rms_norm(x, self.input_norm, self.eps)
        q_NHE = ops.rms_norm(self.q(h).view(-1, self.heads, self.head_dim), self.q_norm, self.eps)
        k_NKE = ops.rms_norm(self.k(h).view(-1, self.kv_heads, self.head_dim), self.k_norm, self.eps)
        v_NKE = self.v(h).view(-1, self.kv_heads, self.head_dim)
        a_NHE = ops.attention(
            ops.rope(q_NHE, cos, sin),
            ops.rope(k_NKE, cos, sin),
            v_NKE,
            tables["cu_seqlens"],
            self.max_seqlen,
            self.head_dim**-0.5,
        )
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
        head_dim = E.size(self.config)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_N.device) / head_dim
        angles = positions_N.float()[:, None] * (1.0 / rope_theta(self.config) ** exponents)
        return {"cos": angles.cos(), "sin": angles.sin()}


def rope_theta(config: Mapping[str, Any]) -> float:
    """RoPE's base; transformers 5 writes it inside `rope_parameters`, earlier ones beside it."""
    parameters = config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)


def build(config: Mapping[str, Any]) -> Qwen3:
    """The model of a ``config.json``; refuses what the block does not compute."""
    for key in ("rope_parameters", "rope_scaling"):
        scaling = config.get(key) or {}
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind != "default":
            raise UserError(
                f"config.json: `{key}`: RoPE scaling `{kind}` is not available for qwen3 yet. Fix: remove it."
            )
    if config.get("use_sliding_window"):
        raise UserError("config.json: `use_sliding_window` is not available for qwen3. Fix: set it to false.")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UserError(f"config.json: `hidden_act` is {activation!r}; qwen3 has silu. Fix: set it to silu.")
    if config.get("attention_dropout"):
        raise UserError("config.json: `attention_dropout` is not available for qwen3. Fix: set it to 0.")
    if H.size(config) % K.size(config):
        raise UserError(
            f"config.json: `num_attention_heads` ({H.size(config)}) must be a multiple of "
            f"`num_key_value_heads` ({K.size(config)})."
        )
    if E.size(config) % 2:
        raise UserError(f"config.json: `head_dim` must be even for RoPE, not {E.size(config)}.")
    model = Qwen3(config)
    _read_every_key(model)
    return model


def _read_every_key(model: Qwen3) -> None:
    """A missing or impossible size is an error here, before data are read."""
    prefix, block = next(model.blocks(0))
    block.tensor_specs(prefix, block.linear_slots(None), train_base=False)
    model.embed_specs(train_base=False)
    model.head_specs(train_base=False)
