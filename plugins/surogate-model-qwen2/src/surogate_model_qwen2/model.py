"""Qwen2 and Qwen2.5, dense (arXiv 2412.15115): pre-norm blocks, grouped queries, biases on q, k and v, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl


class Qwen2Block(decoder.DenseBlock):
    """One decoder layer. The biases of q, k and v are there whatever a file says."""

    q, k, v, o, attend = decoder.attention_slots(bias=True, out_bias=False)


class Qwen2(decoder.Decoder):
    """The causal language model."""

    family, architecture = "qwen2", "Qwen2ForCausalLM"
    layers = dsl.Stack(Qwen2Block, decoder.LAYERS, decoder.PREFIX)
    # The window acts with use_sliding_window, which is refused.
    reads = ("sliding_window", "attention_bias", "qkv_bias")
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}


build = Qwen2.build
