"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import surogate_model_mistral
from transformers import MinistralConfig, MinistralForCausalLM, MistralConfig, MistralForCausalLM

from surogate_core.plugin import UserError
from surogate_testing.family_suite import NO_SHARE, REFUSED, DenseFamilyTests, FamilyFacts
from surogate_testing.parity import TINY, TOLERANCE, ModelPair

AROUND = (1, 2, 4, 5, 6, 13)
"""Lengths of documents around a window of 5."""


class TestMistral(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_mistral,
        config=MistralConfig,
        architecture=MistralForCausalLM,
        published={
            "7b-v0.1": (7_241_732_096, 4096, 32, 32, 8, 14336, 32000, 1e4, False),
            "7b-v0.3": (7_248_023_552, 4096, 32, 32, 8, 14336, 32768, 1e6, False),
            "nemo-12b": (12_247_782_400, 5120, 40, 32, 8, 14336, 131072, 1e6, False),
            "small-24b": (23_572_403_200, 5120, 40, 32, 8, 32768, 131072, 1e8, False),
            "ministral-8b": (8_019_808_256, 4096, 36, 32, 8, 12288, 131072, 1e8, False),
        },
        settings={"sliding_window": 5},
        lengths=AROUND,
        absent=["head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "sliding_window"],
        refused=[*REFUSED, NO_SHARE, ({"sliding_window": -1}, "the window of attend must be an integer of at least 0")],
        cases={
            "window": {},
            "no window": {"sliding_window": None},
            "window of two, tied": {"sliding_window": 2, "tie_word_embeddings": True},
            "one head of keys, head_dim": {"head_dim": 6, "num_key_value_heads": 1, "hidden_size": 20},
        },
        long=["linear", "dynamic", "yarn"],
    )


def ministral(**changes: Any) -> ModelPair:
    config = MinistralConfig(**{**TINY, "head_dim": 8, "sliding_window": 5, **changes})
    return ModelPair.of(
        MinistralForCausalLM, config, surogate_model_mistral.surogate_model_family().build, lengths=AROUND
    )


MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("kinds", [MIXED, None], ids=["mixed", "absent"])
def test_layers_with_and_without_a_window_equal_transformers(kinds: list[str] | None) -> None:
    pair = ministral(layer_types=kinds)
    error, name = pair.gradient_error(recompute=True)
    assert max(pair.logits_error(), error) <= TOLERANCE, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": MIXED[:2]}, r"`layer_types` has 2 entries, and the model has 3 layers"),
        ({"layer_types": "sliding"}, "`layer_types` is 'sliding'"),
        ({"layer_types": ["chunked_attention", *MIXED[:2]]}, "layers of type `chunked_attention`"),
        ({"layer_types": MIXED, "sliding_window": None}, "`sliding_window` is None"),
    ],
)
def test_layer_types_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    config = {**TINY, "model_type": "ministral", "sliding_window": 5, "num_hidden_layers": 3, **changes}
    with pytest.raises(UserError, match=message):
        surogate_model_mistral.surogate_model_family().build(config)
