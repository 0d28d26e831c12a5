"""GLM-4-0414, dense (zai-org/GLM-4-9B-0414): norms on both sides of the branches, RoPE of neighbours in half a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

E = dsl.Dim("head_dim", default=128)


class Glm4Block(decoder.DenseBlock):
    """One decoder layer."""

    interleaved = True
    q, k, v, o, attend = decoder.attention_slots(
        head_dim=E, bias=dsl.Setting("attention_bias", default=True), out_bias=False
    )
    gate, up, gate_up, down = decoder.fused_mlp_slots()
    attention_norm = dsl.Param("post_self_attn_layernorm.weight", decoder.D)
    feedforward_norm = dsl.Param("post_mlp_layernorm.weight", decoder.D)


class Glm4(decoder.Decoder):
    """The causal language model."""

    family, architecture = "glm4", "Glm4ForCausalLM"
    layers = dsl.Stack(Glm4Block, decoder.LAYERS, decoder.PREFIX)
    reads = ("attention_bias", "partial_rotary_factor")
    defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}


build = Glm4.build
