"""OLMo 3 (allenai/Olmo-3): OLMo 2's blocks, some of them with a window, and a RoPE for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

K = dsl.Dim("num_key_value_heads", default=decoder.H.size)
EPS = dsl.Setting("rms_norm_eps", default=1e-5)
THETA = 500_000.0


class Olmo3Block(decoder.DenseBlock):
    """One decoder layer."""

    eps = EPS
    q, k, v, o, attend = decoder.attention_slots(
        kv_heads=K, bias=dsl.Setting("attention_bias", default=False), window=decoder.layer_window
    )
    q_norm, k_norm = decoder.whole_qk_norms(kv_heads=K)
    input_norm = post_norm = None
    attention_norm = dsl.Param("post_attention_layernorm.weight", decoder.D)
    feedforward_norm = dsl.Param("post_feedforward_layernorm.weight", decoder.D)


class Olmo3(decoder.Decoder):
    """The causal language model."""

    family, architecture = "olmo3", "Olmo3ForCausalLM"
    layers = dsl.Stack(Olmo3Block, decoder.LAYERS, decoder.PREFIX)
    head = replace(decoder.Decoder.head, eps=EPS)
    reads = ("attention_bias",)
    defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": THETA}
    default_window = 4096

    def default_type(self, number: int) -> str:
        """Every fourth layer has no window."""
        return decoder.SLIDING if (number + 1) % 4 else decoder.FULL

    def rope_config(self, layer_type: str) -> Mapping[str, Any]:
        """Scaling that is not said for a type of layers is for those without a window.

        transformers takes a flat ``rope_theta`` for these alone, and ignores flat ``rope_parameters``.
        """
        given = self.config.get("rope_parameters")
        if given and not any(isinstance(one, Mapping) for one in given.values()):
            raise dsl.not_computed(
                ["`rope_parameters` of olmo3 has a RoPE for each type of layers, and here is one for all"]
            )
        if given:
            nested = {
                kind: {"rope_theta": THETA, **(given.get(kind) or {})} for kind in (decoder.FULL, decoder.SLIDING)
            }
            return {**self.config, "rope_parameters": nested[layer_type]}
        if self.config.get("rope_theta", THETA) != THETA and decoder.SLIDING in self.layer_types:
            raise dsl.not_computed(
                [f"`rope_theta` is {self.config['rope_theta']!r}, and layers with a window have {THETA:g}"]
            )
        scaling = self.config.get("rope_scaling") if layer_type == decoder.FULL else None
        return {**self.config, "rope_scaling": scaling}


build = Olmo3.build
