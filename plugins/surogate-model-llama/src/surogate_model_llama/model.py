"""Llama 3, 3.1, 3.2, 3.3 (arXiv 2407.21783): pre-norm blocks, grouped queries, RoPE with scaling, SwiGLU."""

from __future__ import annotations

from surogate_core.dsl import Dim, Setting, Stack
from surogate_core.dsl.decoder import LAYERS, PREFIX, Decoder, DenseBlock, H, attention_slots, mlp_slots

K = Dim("num_key_value_heads", default=H.size)
ATTENTION_BIAS = Setting("attention_bias", default=False)
MLP_BIAS = Setting("mlp_bias", default=False)


class LlamaBlock(DenseBlock):
    """One decoder layer, which may have biases."""

    q, k, v, o, attend = attention_slots(kv_heads=K, bias=ATTENTION_BIAS)
    gate, up, down = mlp_slots(bias=MLP_BIAS)


class Llama(Decoder):
    """The causal language model."""

    family, architecture = "llama", "LlamaForCausalLM"
    layers = Stack(LlamaBlock, LAYERS, PREFIX)
    reads = ("attention_bias", "mlp_bias")


build = Llama.build
