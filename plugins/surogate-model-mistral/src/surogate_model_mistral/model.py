"""Mistral (arXiv 2310.06825): Llama's blocks, in which a token sees the last ones alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from surogate_core.plugin import decoder, dsl

WINDOW = 4096
"""Where a file does not name a window; null is none."""


class MistralBlock(decoder.DenseBlock):
    """One decoder layer; all have the same window."""

    attend = dsl.Attention(decoder.H, decoder.K, decoder.E, window=lambda config: config.get("sliding_window", WINDOW))


class Mistral(decoder.Decoder):
    """The causal language model."""

    family, architecture = "mistral", "MistralForCausalLM"
    layers = dsl.Stack(MistralBlock, decoder.LAYERS, decoder.PREFIX)
    reads = ("sliding_window",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}


class MinistralBlock(decoder.DenseBlock):
    """One decoder layer, with a window if its type is sliding."""

    attend = dsl.Attention(decoder.H, decoder.K, decoder.E, window=decoder.layer_window)


class Ministral(decoder.Decoder):
    """Mistral whose layers have a window or none."""

    family, architecture = "ministral", "MinistralForCausalLM"
    layers = dsl.Stack(MinistralBlock, decoder.LAYERS, decoder.PREFIX)
    default_window = WINDOW
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}

    def default_type(self, number: int) -> str:
        """All layers have the window, if there is one."""
        return decoder.FULL if self.window is None else decoder.SLIDING


def build(config: Mapping[str, Any]) -> decoder.Decoder:
    """The model of a ``config.json``, by its ``model_type``."""
    return (Ministral if config.get("model_type") == "ministral" else Mistral).build(config)
