"""Variants of the Llama line that are a few declarations, as docs/model-family.md writes them, against transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from surogate_core.dsl import Attention, Setting, Stack
from surogate_core.dsl.decoder import LAYERS, PREFIX, Decoder, DenseBlock, E, H, K, attention_slots, mlp_slots, qk_norms
from surogate_core.dsl.tensors import TensorSpec
from surogate_core.errors import UserError
from surogate_testing import tiny
from surogate_testing.parity import TINY, TOLERANCE, ModelPair


class MistralBlock(DenseBlock):
    """Each position sees the last ones alone."""

    attend = Attention(H, K, E, window=Setting("sliding_window", default=0))


class Mistral(Decoder):
    """The causal language model."""

    family, architecture = "mistral", "MistralForCausalLM"
    layers = Stack(MistralBlock, LAYERS, PREFIX)
    reads = ("sliding_window",)


class SmolBlock(DenseBlock):
    """A layer that may have biases, or leave out the rotary embedding."""

    q, k, v, o, attend = attention_slots(bias=Setting("attention_bias", default=False))
    gate, up, down = mlp_slots(bias=Setting("mlp_bias", default=False))
    rope = Setting("rotated")


class Smol(Decoder):
    """The causal language model; `no_rope_layers` has a 1 for each layer with the rotary embedding."""

    family, architecture = "smollm3", "SmolLM3ForCausalLM"
    layers = Stack(SmolBlock, LAYERS, PREFIX)
    reads = ("no_rope_layers", "no_rope_layer_interval", "attention_bias", "mlp_bias")

    def layer_config(self, number: int) -> Mapping[str, Any]:
        """What the layer's block is built from."""
        return {**self.config, "rotated": bool(self.config["no_rope_layers"][number])}


class NormedBlock(DenseBlock):
    """With norms of queries and keys."""

    q_norm, k_norm = qk_norms()


class GatedBlock(NormedBlock):
    """With an output gate."""

    q, k, v, o, attend = attention_slots(output_gate=True)


class UnrotatedBlock(NormedBlock):
    """The same without the rotary embedding."""

    rope = False


FAMILIES: dict[str, tuple[Any, Any, type[Decoder]]] = {
    "mistral": (MistralForCausalLM, MistralConfig(**TINY, sliding_window=5), Mistral),
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**TINY, no_rope_layers=[1, 0, 1], mlp_bias=True, pad_token_id=0),
        Smol,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    architecture, config, family = FAMILIES[name]
    pair = ModelPair.of(architecture, config, family.build)
    assert pair.logits_error() <= TOLERANCE
    error, name = pair.gradient_error(recompute=True)
    assert error <= TOLERANCE, name


def family_of(block: type[DenseBlock]) -> type[Decoder]:
    parts = {"family": "own", "architecture": "OwnForCausalLM", "layers": Stack(block, LAYERS, PREFIX)}
    return type("Own", (Decoder,), parts)


def test_norms_act_without_the_rotary_embedding_too() -> None:
    """What no shipped family has. Every pair of the blocks differs, and none does where RoPE does not turn: a token
    alone attends to itself, whatever its query.
    """
    blocks = (NormedBlock, UnrotatedBlock, DenseBlock)
    config = {**TINY, "model_type": "own", "rms_norm_eps": 1e-6}
    engines = [tiny.engine(config, build=family_of(block).build, source=tiny.random_source()) for block in blocks]

    def logits(length: int) -> list[torch.Tensor]:
        return [engine.logits(tiny.batch(tiny.documents((length,))))[:length] for engine in engines]

    assert all(tiny.relative_error(a, b) > 1e-3 for a, b in combinations(logits(9), 2))
    assert all(tiny.relative_error(a, b) < 1e-5 for a, b in combinations(logits(1), 2))


def test_an_output_gate_multiplies_what_each_head_gives_by_its_sigmoid() -> None:
    """A gate of zeros is the factor 1/2 of o; rows of a head's gate are behind those of its query."""
    config, source = {**TINY, "model_type": "own", "rms_norm_eps": 1e-6}, tiny.random_source()

    def drawn(spec: TensorSpec) -> torch.Tensor:
        value = source(spec)
        assert isinstance(value, torch.Tensor)
        return value

    def logits(block: type[DenseBlock], change: Callable[[TensorSpec], torch.Tensor]) -> torch.Tensor:
        engine = tiny.engine(config, build=family_of(block).build, source=change)
        return engine.logits(tiny.batch(tiny.documents((9,))))[:9]

    def halved(spec: TensorSpec) -> torch.Tensor:
        return drawn(spec) * (0.5 if "o_proj" in spec.hf_name else 1.0)

    def gated(spec: TensorSpec) -> torch.Tensor:
        if "q_proj" not in spec.hf_name:
            return drawn(spec)
        outputs, inputs = spec.shape
        queries = drawn(replace(spec, shape=(outputs // 2, inputs))).unflatten(0, (config["num_attention_heads"], -1))
        return torch.cat((queries, torch.zeros_like(queries)), dim=1).flatten(0, 1)

    expected = logits(NormedBlock, halved)
    assert tiny.relative_error(logits(GatedBlock, gated), expected) < 1e-6
    assert tiny.relative_error(logits(GatedBlock, drawn), expected) > 1e-2


def test_defaults_are_of_absent_keys_and_in_the_models_config() -> None:
    """They hold for block and head alike. Null is refused, except for the window and RoPE, where it has a meaning."""
    own = family_of(DenseBlock)
    with pytest.raises(UserError, match=r"key `rms_norm_eps` is missing\. Fix: "):
        own.build(TINY)
    own.defaults = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 7}
    model = own.build({**TINY, "rope_parameters": None, "rope_theta": None, "sliding_window": None})
    assert [model.config[key] for key in own.defaults] == [1e-5, 5e5, None]
    assert {block.eps for _, block in model.blocks(8)} == {model.head.eps.value(model.config)} == {1e-5}
    with pytest.raises(UserError, match=r"key `rms_norm_eps` is null, and must have a value\. Fix: "):
        own.build({**TINY, "rms_norm_eps": None})


@pytest.mark.parametrize(("block", "asked"), [(DenseBlock, True), (NormedBlock, False)])
def test_a_key_that_contradicts_the_declared_norms_is_refused(block: type[DenseBlock], asked: bool) -> None:
    build = family_of(block).build
    build({**TINY, "rms_norm_eps": 1e-6, "qk_norm": not asked})
    with pytest.raises(UserError, match="`qk_norm`"):
        build({**TINY, "rms_norm_eps": 1e-6, "qk_norm": asked})


def test_a_declaration_takes_the_place_of_the_one_that_it_overrides() -> None:
    """The order of the tensors, which is that of their sums, does not depend on what a family changes."""
    plain, normed = (family_of(block).build({**TINY, "rms_norm_eps": 1e-6}) for block in (DenseBlock, NormedBlock))
    orders = []
    for model in (plain, normed):
        prefix, block = next(model.blocks(8))
        orders.append([spec.name for spec in block.tensor_specs(prefix, block.linear_slots(None), train_base=True)])
    assert orders[1][:4] == ["input_norm", "q_norm", "k_norm", "post_norm"]
    assert [name for name in orders[1] if name not in ("q_norm", "k_norm")] == orders[0]
