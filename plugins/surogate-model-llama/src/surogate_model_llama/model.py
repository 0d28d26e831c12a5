"""Llama 3, 3.1, 3.2, 3.3 (arXiv 2407.21783): pre-norm blocks, grouped queries, RoPE with scaling, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

K = dsl.Dim("num_key_value_heads", default=decoder.H.size)
ATTENTION_BIAS = dsl.Setting("attention_bias", default=False)
MLP_BIAS = dsl.Setting("mlp_bias", default=False)


class LlamaBlock(decoder.DenseBlock):
    """One decoder layer, which may have biases."""

    q, k, v, o, attend = decoder.attention_slots(kv_heads=K, bias=ATTENTION_BIAS)
    gate, up, down = decoder.mlp_slots(bias=MLP_BIAS)


class Llama(decoder.Decoder):
    """The causal language model."""

    family, architecture = "llama", "LlamaForCausalLM"
    layers = dsl.Stack(LlamaBlock, decoder.LAYERS, decoder.PREFIX)
    reads = ("attention_bias", "mlp_bias")
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}


build = Llama.build
