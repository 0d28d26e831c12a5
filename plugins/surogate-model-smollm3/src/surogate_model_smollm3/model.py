"""SmolLM3 (github.com/huggingface/smollm): Llama's blocks, some of them without the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from surogate_core.plugin import UserError, decoder, dsl

INTERVAL = dsl.Dim("no_rope_layer_interval", default=4)
OWN = "Fix: use the model's own config.json."


class SmolLM3Block(decoder.DenseBlock):
    """One decoder layer, which may have biases, a window, and no RoPE."""

    rope = dsl.Setting("rotated", default=True)
    q, k, v, o, attend = decoder.attention_slots(
        bias=dsl.Setting("attention_bias", default=False), window=decoder.layer_window
    )
    gate, up, down = decoder.mlp_slots(bias=dsl.Setting("mlp_bias", default=False))


class SmolLM3(decoder.Decoder):
    """The causal language model."""

    family, architecture = "smollm3", "SmolLM3ForCausalLM"
    layers = dsl.Stack(SmolLM3Block, decoder.LAYERS, decoder.PREFIX)
    head = replace(decoder.Decoder.head, tied=dsl.Setting("tie_word_embeddings", default=True))
    reads = ("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval", "use_sliding_window")
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6, "rope_theta": 2_000_000.0}

    @property
    def rotated(self) -> Sequence[bool]:
        """Whether each layer has RoPE. `UserError` for a list of the wrong length."""
        layers, given = decoder.LAYERS.size(self.config), self.config.get("no_rope_layers")
        if given is None:
            return [(number + 1) % INTERVAL.size(self.config) != 0 for number in range(layers)]
        if not isinstance(given, list | tuple) or len(given) < layers or any(one not in (0, 1) for one in given):
            raise UserError(
                f"config.json: `no_rope_layers` must have a 1 or a 0 for each of the {layers} layers, not {given!r}. "
                f"{OWN}"
            )
        return [bool(one) for one in given[:layers]]

    def default_type(self, number: int) -> str:
        """A window where there is no RoPE, if windows are on."""
        has_window = self.config.get("use_sliding_window") and self.window is not None
        return decoder.SLIDING if has_window and not self.rotated[number] else decoder.FULL

    def layer_config(self, number: int) -> Mapping[str, Any]:
        """With the layer's type, and whether it has RoPE."""
        return {**super().layer_config(number), "rotated": self.rotated[number]}

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        if decoder.SLIDING in self.layer_types and not self.config.get("use_sliding_window"):
            raise UserError(
                f"config.json: `layer_types` has layers with a window, and `use_sliding_window` is not true. {OWN}"
            )
        super().check()


build = SmolLM3.build
