"""Configurations as hubs carry them: each loads equal to transformers, or is refused with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from surogate_core.errors import UserError
from surogate_core.plugins.registry import model_families
from surogate_testing.parity import TOLERANCE, ModelPair

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "attn_implementation": "eager",
    "pad_token_id": None,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", **YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = [SLIDING, SLIDING, FULL]
NESTED = {
    FULL: {"rope_type": "yarn", "rope_theta": 5e3, **YARN},
    SLIDING: {"rope_type": "default", "rope_theta": 5e3},
}
FACTORS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0}

EQUAL: dict[str, dict[str, Any]] = {
    "old keys": {"model_type": "llama", "rope_theta": 5e3, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "old keys with the new name": {"model_type": "llama", "rope_theta": 5e3, "rope_scaling": LLAMA3},
    "new keys": {"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e3, **YARN}},
    "no RoPE keys": {"model_type": "mistral", "head_dim": 8},
    "null scaling, null window": {
        "model_type": "mistral",
        "rope_scaling": None,
        "sliding_window": None,
        "rope_theta": 1e6,
    },
    "absent window": {"model_type": "mistral", "rope_theta": 1e4},
    "window, tied": {"model_type": "mistral", "sliding_window": 4, "tie_word_embeddings": True},
    "null head_dim": {"model_type": "mistral", "head_dim": None, "sliding_window": 4},
    "types": {"model_type": "ministral", "head_dim": 8, "sliding_window": 4, "layer_types": TYPES},
    "no types": {"model_type": "smollm3", "no_rope_layer_interval": 2, "layer_types": None},
    "list without RoPE, biases": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1], "mlp_bias": True},
    "fused, null heads of keys": {"model_type": "phi3", "num_key_value_heads": None, "rope_scaling": None},
    "flat partial": {"model_type": "phi3", "partial_rotary_factor": 0.75, "rope_theta": 1e4},
    "partial by default": {"model_type": "glm4", "head_dim": 8},
    "nested partial": {
        "model_type": "glm4",
        "head_dim": 8,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    },
    "factors": {"model_type": "granite", **FACTORS},
    "absent factors": {"model_type": "granite"},
    "norms behind": {"model_type": "olmo2", "rope_theta": 5e5, "eos_token_id": 7},
    "a RoPE for each type": {
        "model_type": "olmo3",
        "rope_parameters": NESTED,
        "sliding_window": 4,
        "layer_types": TYPES,
    },
    "scaling for one type": {
        "model_type": "olmo3",
        "rope_scaling": {"rope_type": "yarn", **YARN},
        "rope_theta": 500_000,
    },
    "biases of queries": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown RoPE": ({"model_type": "llama", "rope_scaling": {"type": "spiral", "factor": 2.0}}, "`spiral` is not"),
    "two RoPEs": (
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": NESTED[FULL]},
        "`rope_scaling` and `rope_parameters` are both given and differ",
    ),
    "types without a reader": ({"model_type": "llama", "layer_types": TYPES}, "`layer_types` is"),
    "a window without a reader": ({"model_type": "llama", "sliding_window": 4}, "`sliding_window` is 4"),
    "factors without a reader": ({"model_type": "llama", **FACTORS}, "`embedding_multiplier` is 6.0"),
    "no RoPE without a reader": ({"model_type": "llama", "no_rope_layers": [1, 0, 1]}, "`no_rope_layers` is"),
    "a part without a reader": ({"model_type": "mistral", "partial_rotary_factor": 0.5}, "`partial_rotary_factor` is"),
    "types of the wrong length": ({"model_type": "olmo3", "layer_types": TYPES[:2]}, "`layer_types` has 2 entries"),
    "types that contradict": (
        {"model_type": "smollm3", "layer_types": TYPES, "sliding_window": 4},
        "`use_sliding_window` is not true",
    ),
    "a base for one type": ({"model_type": "olmo3", "rope_theta": 1e4}, "`rope_theta` is 10000.0"),
    "scaling of another family": (
        {"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "RoPE scaling `yarn` is not defined for phi3",
    ),
    "window of text": ({"model_type": "mistral", "sliding_window": "4"}, "window of attend must be an integer"),
}


def built(config: dict[str, Any]) -> Any:
    family = next(one for one in model_families().values() if config["model_type"] in one.hf_model_types)
    return family.build(config)


@pytest.mark.parametrize("name", EQUAL)
def test_a_configuration_of_the_hub_loads_equal_to_transformers(name: str) -> None:
    given = {**SIZES, **EQUAL[name]}
    theirs = AutoConfig.for_model(**copy.deepcopy(given))
    kind = type(AutoModelForCausalLM.from_config(theirs))
    pair = ModelPair.of(kind, theirs, lambda _: built(given), lengths=(1, 9, 17))
    assert pair.logits_error() <= TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_is_not_computed_is_refused_with_the_reason(name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason) as caught:
        built({**SIZES, **changes})
    message = str(caught.value).lower()
    assert not any(advice in message for advice in ("remove it", "switch", "set it", "choose one"))
