"""Gemma 3's text model (arXiv 2503.19786): norms around both branches, and five windowed layers to each full one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from surogate_core.plugin import decoder, dsl, ops


class Gemma3Block(decoder.DenseBlock):
    """One decoder layer. What a branch reads and what it adds are normed; the norms multiply by 1 + w."""

    norm_offset = 1.0
    q, k, v, o = decoder.attention_slots(bias=dsl.Setting("attention_bias"))[:4]
    attend = dsl.Attention(
        decoder.H,
        decoder.K,
        decoder.E,
        scale=lambda config: config["query_pre_attn_scalar"] ** -0.5,
        window=decoder.layer_window,
    )
    q_norm, k_norm = decoder.qk_norms(init="zeros")
    input_norm = dsl.Param("input_layernorm.weight", decoder.D, init="zeros")
    attention_norm = dsl.Param("post_attention_layernorm.weight", decoder.D, init="zeros")
    post_norm = dsl.Param("pre_feedforward_layernorm.weight", decoder.D, init="zeros")
    feedforward_norm = dsl.Param("post_feedforward_layernorm.weight", decoder.D, init="zeros")

    def gated(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        """[N, F]."""
        return ops.geglu(gate_NF, up_NF)


class Gemma3(decoder.Decoder):
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
        "rms_norm_eps": 1e-6,
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
    embed = dsl.Embedding(
        "model.embed_tokens.weight",
        decoder.V,
        decoder.D,
        scale=lambda config: config["hidden_size"] ** 0.5,
        rounded=True,
    )
    layers = dsl.Stack(Gemma3Block, decoder.LAYERS, decoder.PREFIX)
    head = replace(decoder.Decoder.head, offset=1.0, softcap=dsl.Setting("final_logit_softcapping", default=0.0))

    def default_type(self, number: int) -> str:
        """Every sixth layer is full."""
        step = self.config.get("_sliding_window_pattern") or self.config["sliding_window_pattern"]
        return decoder.SLIDING if (number + 1) % step else decoder.FULL

    def rope_config(self, layer_type: str) -> Mapping[str, Any]:
        """Each type of layer has a base. `rope_scaling` is that of the full ones."""
        given, scaling = (self.config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
        is_full = layer_type == decoder.FULL
        theta = self.config["rope_theta" if is_full else "rope_local_base_freq"]
        own = {"rope_theta": theta, **(given.get(layer_type) or {}), **(scaling if is_full else {})}
        key = "rope_scaling" if is_full and scaling else "rope_parameters"
        return {**self.config, "rope_parameters": None, "rope_scaling": None, key: own}


build = Gemma3.build
