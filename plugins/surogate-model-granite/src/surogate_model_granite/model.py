"""Granite 3, dense (ibm-granite/granite-3.*): Llama's blocks with factors of embedding, branches, scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

K = dsl.Dim("num_key_value_heads", default=decoder.H.size)
DIVISOR = dsl.Setting("logits_scaling", default=1.0)


class GraniteBlock(decoder.DenseBlock):
    """One decoder layer, which may have biases."""

    residual = dsl.Setting("residual_multiplier", default=1.0)
    q, k, v, o, attend = decoder.attention_slots(
        kv_heads=K,
        bias=dsl.Setting("attention_bias", default=False),
        scale=dsl.Setting("attention_multiplier", default=1.0),
    )
    gate, up, down = decoder.mlp_slots(bias=dsl.Setting("mlp_bias", default=False))


class Granite(decoder.Decoder):
    """The causal language model."""

    family, architecture = "granite", "GraniteForCausalLM"
    embed = dsl.Embedding(
        "model.embed_tokens.weight", decoder.V, decoder.D, scale=dsl.Setting("embedding_multiplier", default=1.0)
    )
    layers = dsl.Stack(GraniteBlock, decoder.LAYERS, decoder.PREFIX)
    head = replace(decoder.Decoder.head, scale=lambda config: 1 / dsl.number_of(DIVISOR, config, "", least=1e-30))
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}
    reads = (
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    )


build = Granite.build
