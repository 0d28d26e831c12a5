"""Phi-3 and Phi-4 (arXiv 2412.08905): Llama's blocks with fused projections and RoPE on a part of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

K = dsl.Dim("num_key_value_heads", default=decoder.H.size)


class Phi3Block(decoder.DenseBlock):
    """One decoder layer."""

    q, k, v, qkv, o, attend = decoder.fused_attention_slots(kv_heads=K, window=dsl.Setting("sliding_window", default=0))
    gate, up, gate_up, down = decoder.fused_mlp_slots()


class Phi3(decoder.Decoder):
    """The causal language model."""

    family, architecture = "phi3", "Phi3ForCausalLM"
    layers = dsl.Stack(Phi3Block, decoder.LAYERS, decoder.PREFIX)
    reads = ("sliding_window", "partial_rotary_factor")
    defaults: ClassVar[Mapping[str, Any]] = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        super().check()
        if (kind := self.ropes()[""].kind) not in ("default", "longrope"):
            raise dsl.not_computed([f"RoPE scaling `{kind}` is not defined for phi3, only longrope"])


build = Phi3.build
