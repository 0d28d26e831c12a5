"""What the kit finds in a family that reads a ``config.json`` otherwise than transformers' class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from surogate_core.bundles import ModelFamily
from surogate_core.dsl import Attention, Dim, Param, Setting, Stack
from surogate_core.dsl.decoder import LAYERS, PREFIX, D, Decoder, DenseBlock, E, H, K, attention_slots
from surogate_testing.config_keys import reads_absent_and_null_keys_as_transformers
from surogate_testing.models import equals_transformers, reads_its_presets, tiny_preset

torch.set_num_threads(1)

SIZES: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "sliding_window": 16,
}


class Windowed(DenseBlock):
    """As Mistral's."""

    attend = Attention(H, K, E, window=Setting("sliding_window", default=4096))


class Own(Decoder):
    """As Mistral, whose class in transformers is the reference."""

    family, architecture = "own", "MistralForCausalLM"
    layers = Stack(Windowed, LAYERS, PREFIX)
    reads = ("sliding_window",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}


def family(
    block: type[DenseBlock] = Windowed, *, config: Mapping[str, Any] | None = None, **members: Any
) -> ModelFamily:
    """Layers of a block; `members`: of the model's class."""
    model: type[Decoder] = type("M", (Own,), {"layers": Stack(block, LAYERS, PREFIX), **members})
    tiny = {**SIZES, "model_type": "mistral", "architectures": ["MistralForCausalLM"], **(config or {})}
    return ModelFamily(name="own", hf_model_types=("mistral",), build=model.build, presets={"tiny": tiny})


def found(of: ModelFamily, check: Callable[[ModelFamily], object] = reads_absent_and_null_keys_as_transformers) -> str:
    with pytest.raises(AssertionError) as error:
        check(of)
    return str(error.value)


def test_a_family_with_transformers_defaults_passes() -> None:
    reads_absent_and_null_keys_as_transformers(family())
    reads_absent_and_null_keys_as_transformers(family(config={"rms_norm_eps": 1e-6, "head_dim": 8}))


class OtherEps(Windowed):
    """Its norms have another default than transformers' class."""

    eps = Setting("rms_norm_eps", default=1e-5)


def test_another_default_of_a_key_is_found_whether_the_preset_has_it_or_not() -> None:
    block = family(OtherEps, defaults={})
    assert "`tiny` as it is: logits: relative error" in found(family(defaults={"rms_norm_eps": 1e-5}))
    text = found(family(defaults={"rms_norm_eps": 1e-5}, config={"rms_norm_eps": 1e-4}))
    assert "`tiny` without `rms_norm_eps`: logits: relative error" in text
    assert "transformers takes 1e-06. Fix: give the family's default, in `defaults` of a `Decoder`" in text
    with pytest.raises(Exception, match="key `rms_norm_eps` is missing"):
        block.build(block.presets["tiny"])  # the head's has no default: forgetting one of the two is an error
    head = replace(Own.head, eps=Setting("rms_norm_eps", default=1e-6))
    assert "rms_norm_eps 1e-06" in found(family(OtherEps, defaults={}, head=head))


def test_a_key_that_the_family_reads_otherwise_on_purpose_stays() -> None:
    own: dict[str, Any] = {"defaults": {"rms_norm_eps": 1e-5}, "config": {"rms_norm_eps": 1e-4}}
    reads_absent_and_null_keys_as_transformers(family(unlike_transformers=("rms_norm_eps",), **own))


class OtherHeads(Windowed):
    """Its heads have another default size."""

    q, k, v, o, attend = attention_slots(
        head_dim=Dim("head_dim", default=16), window=Setting("sliding_window", default=4096)
    )


class Unlimited(DenseBlock):
    """Without a window."""


class NullWindow(Windowed):
    """Null gives the window of an absent key."""

    attend = Attention(H, K, E, window=lambda config: config.get("sliding_window") or 4096)


class OtherWindow(Windowed):
    """No document of the checks exceeds the window of an absent key."""

    attend = Attention(H, K, E, window=Setting("sliding_window", default=2048))


@pytest.mark.parametrize(
    ("block", "config", "expected"),
    [
        (
            OtherHeads,
            {"head_dim": 8},
            "without `head_dim`: model.layers.0.self_attn.k_proj.weight has the shape (32, 32)",
        ),
        (NullWindow, {}, "with `sliding_window` null: attention has a window of 4096, and in transformers' class of 0"),
        (
            OtherWindow,
            {},
            "without `sliding_window`: attention has a window of 2048, and in transformers' class of 4096",
        ),
        (Unlimited, {}, "as it is: logits: relative error"),
        (Unlimited, {"sliding_window": 100}, "as it is: logits: relative error"),
    ],
)
def test_sizes_and_windows_are_compared(block: type[DenseBlock], config: dict[str, Any], expected: str) -> None:
    assert expected in found(family(block, config=config))


def test_a_window_that_no_document_exceeds_is_refused() -> None:
    big = {"sliding_window": 1000, "max_position_embeddings": 4096}
    assert "has a window of 1000 positions" in found(family(config=big), tiny_preset)
    assert "`sliding_window` 1000, and no document" in found(family(Unlimited, config=big), equals_transformers)


@pytest.mark.slow
def test_documents_exceed_the_window_and_every_tiny_preset_is_compared() -> None:
    text = found(family(Unlimited), equals_transformers)
    assert "preset `tiny`: logits: relative error" in text
    own = family()
    equals_transformers(own)

    def build(config: Mapping[str, Any]) -> Decoder:
        return Own.build({**config, "rms_norm_eps": 1e-6 if config["tie_word_embeddings"] else 0.1})

    tied, untied = ({**own.presets["tiny"], "tie_word_embeddings": value} for value in (True, False))
    varied = replace(own, build=build, presets={"tiny": tied, "tiny-untied": untied, "large": {**untied}})
    assert "preset `tiny-untied`: logits: relative error" in found(varied, equals_transformers)


class Extra(Windowed):
    """Has a norm that transformers' class lacks."""

    attention_norm = Param("extra_norm.weight", D)


class Fewer(Windowed):
    """Lacks one that it has."""

    post_norm = None


def test_other_tensors_are_named_with_what_declares_them() -> None:
    text = found(family(Extra), equals_transformers)
    assert "no tensor model.layers.0.extra_norm.weight, which Extra.attention_norm declares" in text
    text = found(family(Fewer), equals_transformers)
    assert "has the tensor model.layers.0.post_attention_layernorm.weight, which nothing declares" in text


def test_a_preset_that_build_refuses_says_how_a_family_reads_a_key() -> None:
    text = found(family(config={"residual_multiplier": 0.5}), reads_its_presets)
    assert "`residual_multiplier` is 0.5" in text
    assert "name the key in `reads`" in text


def test_a_preset_that_transformers_cannot_read_is_found() -> None:
    text = found(family(config={"head_dim": 8, "initializer_range": "wide"}), reads_its_presets)
    assert "preset tiny: transformers' configuration cannot be made of it" in text
    assert "initializer_range" in text
