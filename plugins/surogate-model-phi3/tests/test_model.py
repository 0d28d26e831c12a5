"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import surogate_model_phi3
from transformers import Phi3Config, Phi3ForCausalLM

from surogate_testing.family_suite import NO_SHARE, REFUSED, SIZES, DenseFamilyTests, FamilyFacts

REFUSALS = [one for one in REFUSED if "head_dim" not in one[0] and "llama3" not in str(one[0])]
TYPES = {"type": "longrope", "short_factor": [1.0, 1.25, 1.5], "long_factor": [2.0, 3.5, 4.0]}
SU = {**TYPES, "type": "su", "original_max_position_embeddings": 6}
PART = {"hidden_size": 32, "partial_rotary_factor": 0.75, "rope_theta": 5000.0, "rope_parameters": None}


class TestPhi3(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_phi3,
        config=Phi3Config,
        architecture=Phi3ForCausalLM,
        published={
            "phi-4": (14_659_507_200, 5120, 40, 40, 10, 17920, 100352, 2.5e5, False),
            "phi-4-mini": (3_836_021_760, 3072, 32, 24, 8, 8192, 200064, 1e4, True),
        },
        settings={"pad_token_id": None, "original_max_position_embeddings": 6},
        lengths=(1, 2, 5, 6, 7, 13),
        targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        sizes=[size for size in SIZES if size != "num_key_value_heads"],
        absent=["num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act",
                "sliding_window", "partial_rotary_factor", "original_max_position_embeddings", "rope_scaling"],
        refused=[
            *REFUSALS,
            NO_SHARE,
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling `linear` is not defined for phi3"),
            ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "RoPE scaling `yarn` is not defined for phi3"),
            ({"rope_scaling": TYPES}, "`rope_scaling.short_factor` must be 12 numbers above 0, .* not 3 values"),
            ({"partial_rotary_factor": 0.6}, "`partial_rotary_factor` is 0.6: 19 of 32 features"),
            ({"resid_pdrop": 0.1}, "`resid_pdrop` is 0.1"),
        ],
        cases={
            "whole heads": {},
            "window, tied": {"sliding_window": 5, "tie_word_embeddings": True},
            "longrope on a part": {**PART, "rope_scaling": TYPES},
            "su, no grouped queries": {**PART, "rope_scaling": SU, "num_key_value_heads": None},
        },
        exported={**PART, "rope_scaling": TYPES, "original_max_position_embeddings": 20},
    )  # fmt: skip
