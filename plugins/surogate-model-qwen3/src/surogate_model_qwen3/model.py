"""Qwen3, dense (arXiv 2505.09388): pre-norm blocks, grouped queries with q/k norms, SwiGLU."""

from __future__ import annotations

from surogate_core.dsl import Dim, Setting, Stack
from surogate_core.dsl.decoder import LAYERS, PREFIX, Decoder, DenseBlock, attention_slots, qk_norms

E = Dim("head_dim", default=128)  # transformers' default, whatever the width
BIAS = Setting("attention_bias", default=False)


class Qwen3Block(DenseBlock):
    """One decoder layer, with norms of queries and keys."""

    q, k, v, o, attend = attention_slots(head_dim=E, bias=BIAS)
    q_norm, k_norm = qk_norms(E)


class Qwen3(Decoder):
    """The causal language model."""

    family, architecture = "qwen3", "Qwen3ForCausalLM"
    layers = Stack(Qwen3Block, LAYERS, PREFIX)
    reads = ("attention_bias", "sliding_window")  # the window acts with use_sliding_window, which is refused


build = Qwen3.build
