"""Qwen3, dense (arXiv 2505.09388): pre-norm blocks, grouped queries with q/k norms, SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

E = dsl.Dim("head_dim", default=128)  # transformers' default, whatever the width
BIAS = dsl.Setting("attention_bias", default=False)


class Qwen3Block(decoder.DenseBlock):
    """One decoder layer, with norms of queries and keys."""

    q, k, v, o, attend = decoder.attention_slots(head_dim=E, bias=BIAS)
    q_norm, k_norm = decoder.qk_norms(E)


class Qwen3(decoder.Decoder):
    """The causal language model."""

    family, architecture = "qwen3", "Qwen3ForCausalLM"
    layers = dsl.Stack(Qwen3Block, decoder.LAYERS, decoder.PREFIX)
    reads = ("attention_bias", "sliding_window")  # the window acts with use_sliding_window, which is refused
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}


build = Qwen3.build
