"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import surogate_model_glm4
from transformers import Glm4Config, Glm4ForCausalLM

from surogate_testing.family_suite import REFUSED, DenseFamilyTests, FamilyFacts


class TestGlm4(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_glm4,
        config=Glm4Config,
        architecture=Glm4ForCausalLM,
        published={"9b": (9_400_279_040, 4096, 40, 32, 2, 13696, 151552, 1e4, False)},
        settings={"pad_token_id": None, "head_dim": 8},
        lengths=(1, 2, 13, 9),
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
        absent=["rope_theta", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "hidden_act",
                "partial_rotary_factor"],
        refused=[*REFUSED, ({"partial_rotary_factor": 0.3}, "`partial_rotary_factor` is 0.3: 9 of 32 features")],
        cases={
            "untied": {},
            "tied, without biases": {"tie_word_embeddings": True, "attention_bias": False},
            "whole heads, odd": {"partial_rotary_factor": 1.0, "hidden_size": 20, "head_dim": 6,
                                 "num_key_value_heads": 1},
            "a quarter": {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.25}},
        },
        exported={"attention_bias": True},
        long=["linear", "yarn"],
    )  # fmt: skip
