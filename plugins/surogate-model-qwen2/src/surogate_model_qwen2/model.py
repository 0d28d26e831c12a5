"""Qwen2 and Qwen2.5, dense (arXiv 2412.15115): pre-norm blocks, grouped queries, biases on q, k and v, SwiGLU."""

from __future__ import annotations

from surogate_core.dsl import Stack
from surogate_core.dsl.decoder import LAYERS, PREFIX, Decoder, DenseBlock, attention_slots


class Qwen2Block(DenseBlock):
    """One decoder layer. The biases of q, k and v are there whatever a file says."""

    q, k, v, o, attend = attention_slots(bias=True, out_bias=False)


class Qwen2(Decoder):
    """The causal language model."""

    family, architecture = "qwen2", "Qwen2ForCausalLM"
    layers = Stack(Qwen2Block, LAYERS, PREFIX)
    # The window acts with use_sliding_window, which is refused.
    reads = ("sliding_window", "attention_bias", "qkv_bias")


build = Qwen2.build
