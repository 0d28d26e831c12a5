"""Gemma 3's text model (arXiv 2503.19786): norms around both branches, and five windowed layers to each full one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from surogate_core.dsl import Attention, Embedding, Param, Setting, Stack
from surogate_core.dsl.decoder import (
    FULL,
    LAYERS,
    PREFIX,
    SLIDING,
    D,
    Decoder,
    DenseBlock,
    E,
    H,
    K,
    V,
    attention_slots,
    layer_window,
    qk_norms,
)
from surogate_core.kernels import ops


class Gemma3Block(DenseBlock):
    """One decoder layer. What a branch reads and what it adds are normed; the norms multiply by 1 + w."""

    norm_offset = 1.0
    q, k, v, o = attention_slots(bias=Setting("attention_bias"))[:4]
    attend = Attention(H, K, E, scale=lambda config: config["query_pre_attn_scalar"] ** -0.5, window=layer_window)
    q_norm, k_norm = qk_norms(init="zeros")
    input_norm = Param("input_layernorm.weight", D, init="zeros")
    attention_norm = Param("post_attention_layernorm.weight", D, init="zeros")
    post_norm = Param("pre_feedforward_layernorm.weight", D, init="zeros")
    feedforward_norm = Param("post_feedforward_layernorm.weight", D, init="zeros")

    def gated(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        """[N, F]."""
        return ops.geglu(gate_NF, up_NF)


class Gemma3(Decoder):
    """The causal language model."""

    family, architecture = "gemma3", "Gemma3ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    }
    reads = (
        *("attention_bias", "hidden_act", "query_pre_attn_scalar"),
        *("final_logit_softcapping", "rope_local_base_freq"),
    )
    computes: ClassVar[Mapping[str, Any]] = {"hidden_activation": "gelu_pytorch_tanh"}
    embed = Embedding(
        "model.embed_tokens.weight", V, D, scale=lambda config: config["hidden_size"] ** 0.5, rounded=True
    )
    layers = Stack(Gemma3Block, LAYERS, PREFIX)
    head = replace(Decoder.head, offset=1.0, softcap=Setting("final_logit_softcapping", default=0.0))

    def default_type(self, number: int) -> str:
        """Every sixth layer is full."""
        step = self.config.get("_sliding_window_pattern") or self.config["sliding_window_pattern"]
        return SLIDING if (number + 1) % step else FULL

    def rope_config(self, layer_type: str) -> Mapping[str, Any]:
        """Each type of layer has a base. `rope_scaling` is that of the full ones."""
        given, scaling = (self.config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
        is_full = layer_type == FULL
        theta = self.config["rope_theta" if is_full else "rope_local_base_freq"]
        own = {"rope_theta": theta, **(given.get(layer_type) or {}), **(scaling if is_full else {})}
        key = "rope_scaling" if is_full and scaling else "rope_parameters"
        return {**self.config, "rope_parameters": None, "rope_scaling": None, key: own}


build = Gemma3.build
