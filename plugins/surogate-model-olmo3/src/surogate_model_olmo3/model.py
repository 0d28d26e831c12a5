"""OLMo 2 (arXiv 2501.00656) and OLMo 3, which has a window in some layers and a RoPE for each kind.

Norms are behind the branches, and those of queries and keys over all heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

K = dsl.Dim("num_key_value_heads", default=decoder.H.size)
THETA = 500_000.0


class OlmoBlock(decoder.DenseBlock):
    """One decoder layer, with a window if its type is sliding."""

    q, k, v, o, attend = decoder.attention_slots(
        kv_heads=K, bias=dsl.Setting("attention_bias", default=False), window=decoder.layer_window
    )
    q_norm, k_norm = decoder.whole_qk_norms(kv_heads=K)
    input_norm = post_norm = None
    attention_norm = dsl.Param("post_attention_layernorm.weight", decoder.D)
    feedforward_norm = dsl.Param("post_feedforward_layernorm.weight", decoder.D)


class Olmo2(decoder.Decoder):
    """The causal language model of OLMo 2."""

    family, architecture = "olmo2", "Olmo2ForCausalLM"
    layers = dsl.Stack(OlmoBlock, decoder.LAYERS, decoder.PREFIX)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    reads = ("attention_bias",)


class Olmo3(Olmo2):
    """The causal language model of OLMo 3."""

    family, architecture = "olmo3", "Olmo3ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {**Olmo2.defaults, "rope_theta": THETA}
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


def build(config: Mapping[str, Any]) -> decoder.Decoder:
    """The model of a ``config.json``, by its ``model_type``."""
    return (Olmo2 if config.get("model_type") == "olmo2" else Olmo3).build(config)
