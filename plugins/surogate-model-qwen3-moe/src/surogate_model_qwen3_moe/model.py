"""Qwen3 with a mixture of experts (arXiv 2505.09388): Qwen3's attention, and experts or a dense feed-forward.

Shape suffixes: N tokens, D model features, H query heads, K key/value heads, A head features, F features of a dense
feed-forward, I features of an expert, E experts, C experts of a token, R = N·C rows sorted by expert, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl import (
    Attention,
    Block,
    Dim,
    Embedding,
    Experts,
    Linear,
    LMHead,
    Model,
    Param,
    Routes,
    Setting,
    Stack,
    project,
    project_combined,
)
from surogate_core.dsl.decoder import check_decoder, even_share
from surogate_core.dsl.dims import read_key
from surogate_core.dsl.rope import Rope
from surogate_core.dsl.routing import router_figures, router_sides
from surogate_core.errors import UserError
from surogate_core.kernels import ops


def _local_experts(config: Mapping[str, Any]) -> Any:
    """transformers 5 saves the number of experts under this name."""
    found = config.get("num_local_experts")
    return read_key(config, "num_experts") if found is None else found


D = Dim("hidden_size")
H = Dim("num_attention_heads")
K = Dim("num_key_value_heads")
A = Dim("head_dim", default=even_share)
F = Dim("intermediate_size")
I = Dim("moe_intermediate_size")  # noqa: E741
E = Dim("num_experts", default=_local_experts)
C = Dim("num_experts_per_tok")
V = Dim("vocab_size")
LAYERS = Dim("num_hidden_layers")
SPARSE_STEP = Dim("decoder_sparse_step", default=1)
RENORMALISE = Setting("norm_topk_prob", default=False)
DENSE_LAYERS = Setting("mlp_only_layers", default=())
BIAS = Setting("attention_bias", default=False)
EPS = Setting("rms_norm_eps", default=1e-6)
PREFIX = "model.layers.{i}."
OWN = "Fix: use the model's own config.json."
# The window acts with use_sliding_window, which is refused.
READS = ("attention_bias", "sliding_window", "num_experts", "num_local_experts")
COMPUTES = {"qk_norm": True, "use_qk_norm": True}


class AttentionBlock(Block):
    """What the layers share: attention, and the norms."""

    heads, kv_heads, head_dim, eps = H, K, A, EPS
    input_norm = Param("input_layernorm.weight", D)
    q_norm = Param("self_attn.q_norm.weight", A)
    k_norm = Param("self_attn.k_norm.weight", A)
    post_norm = Param("post_attention_layernorm.weight", D)
    q = Linear("self_attn.q_proj", D, H * A, region="qkv", bias=BIAS)
    k = Linear("self_attn.k_proj", D, K * A, region="qkv", bias=BIAS)
    v = Linear("self_attn.v_proj", D, K * A, region="qkv", bias=BIAS)
    o = Linear("self_attn.o_proj", H * A, D, region="att", bias=BIAS)
    attend = Attention(H, K, A)

    def attended(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]: x and its attention."""
        cos, sin = tables["cos"], tables["sin"]
        h = ops.rms_norm(x, self.input_norm, self.eps)
        q_NHA = self.q(h).view(-1, self.heads, self.head_dim)
        k_NKA = self.k(h).view(-1, self.kv_heads, self.head_dim)
        v_NKA = self.v(h).view(-1, self.kv_heads, self.head_dim)
        q_NHA, k_NKA, v_NKA = ops.norm_rope(q_NHA, k_NKA, v_NKA, self.q_norm, self.k_norm, self.eps, cos, sin)
        a_NHA = self.attend(q_NHA, k_NKA, v_NKA)
        return x + self.o(a_NHA.flatten(1))


class DenseBlock(AttentionBlock):
    """A layer with a dense feed-forward."""

    gate = Linear("mlp.gate_proj", D, F, region="ffn")
    up = Linear("mlp.up_proj", D, F, region="ffn")
    down = Linear("mlp.down_proj", F, D, region="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        x = self.attended(x, tables)
        h = ops.rms_norm(x, self.post_norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class SparseBlock(AttentionBlock):
    """A layer with experts. Every token goes to its C most probable experts, whatever their load."""

    choices, renormalise = C, RENORMALISE
    router = Param("mlp.gate.weight", E, D, init="normal", role="router")
    gate = Experts("mlp.experts.{e}.gate_proj", E, C, D, I, region="ffn", fused="mlp.experts.gate_up_proj")
    up = Experts("mlp.experts.{e}.up_proj", E, C, D, I, region="ffn", fused="mlp.experts.gate_up_proj")
    down = Experts("mlp.experts.{e}.down_proj", E, C, I, D, region="ffn", fused="mlp.experts.down_proj")
    tokens, probability, z, mass = router_sides(E)

    def scores(self, h: Tensor) -> Tensor:
        """[N, D] → [N, E] fp32: the router's logits, rounded to h's dtype.

        The gradients of routing and of the router's losses are added in fp32: in bf16, rounding would swallow a part of
        the smaller one.
        """
        return (h @ self.router.t()).float()

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D], and what the router reports."""
        x = self.attended(x, tables)
        h = ops.rms_norm(x, self.post_norm, self.eps)
        logits_NE = self.scores(h)
        routes = Routes.of(logits_NE, self.choices, renormalise=self.renormalise)
        gate_RI, up_RI = project(h, routes, self.gate, self.up)
        y_ND = project_combined(ops.swiglu(gate_RI, up_RI), routes, self.down)
        return x + y_ND, router_figures(logits_NE, routes, tables)


class Qwen3Moe(Model):
    """The causal language model."""

    architecture = "Qwen3MoeForCausalLM"
    embed = Embedding("model.embed_tokens.weight", V, D)
    layers = Stack(SparseBlock, LAYERS, PREFIX)
    head = LMHead("lm_head.weight", "model.norm.weight", EPS, tied=Setting("tie_word_embeddings", default=False))

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin, [N, A/2] fp32."""
        return Rope(self.config, A.size(self.config)).tables(positions_N)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        step = SPARSE_STEP.size(self.config)
        return (layer + 1) % step == 0 and layer not in DENSE_LAYERS.value(self.config)

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        """Every layer as (HF name prefix, block), in order."""
        made = {kind: kind(self.config, max_seqlen) for kind in (DenseBlock, SparseBlock)}
        for layer in range(LAYERS.size(self.config)):
            yield PREFIX.format(i=layer), made[SparseBlock if self.is_sparse(layer) else DenseBlock]


def build(config: Mapping[str, Any]) -> Qwen3Moe:
    """The model of a ``config.json``; refuses what the blocks do not compute."""
    model = Qwen3Moe(config)
    _check_layers(model)
    check_decoder(model, family="qwen3-moe", heads=H, kv_heads=K, head_dim=A, reads=READS, computes=COMPUTES)
    return model


def _check_layers(model: Qwen3Moe) -> None:
    """Refuse, by the name of the key, layers and experts that cannot be."""
    config, layers = model.config, LAYERS.size(model.config)
    dense = DENSE_LAYERS.value(config)
    if not isinstance(dense, list | tuple) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in dense
    ):
        raise UserError(f"config.json: `mlp_only_layers` is {dense!r}; it lists layers from 0 to {layers - 1}. {OWN}")
    if not any(map(model.is_sparse, range(layers))):
        raise UserError(
            "config.json: no layer has experts: `mlp_only_layers` and `decoder_sparse_step` leave none. "
            'Fix: use the model\'s own config.json. Without experts it is a dense model, of "model_type": "qwen3".'
        )
    experts, choices = E.size(config), C.size(config)
    if choices > experts:
        raise UserError(
            f"config.json: `num_experts_per_tok` ({choices}) is larger than `num_experts` ({experts}). {OWN}"
        )
    if not isinstance(RENORMALISE.value(config), bool):
        raise UserError(
            f"config.json: `norm_topk_prob` is {RENORMALISE.value(config)!r}, and must be true or false. {OWN}"
        )
