"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

from typing import Any

import surogate_model_ministral3
from transformers import Ministral3Config, Ministral3ForCausalLM

from surogate_testing.family_suite import REFUSED, DenseFamilyTests, FamilyFacts

ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "llama_4_scaling_beta": 0.5,
}
WITHOUT = {key: value for key, value in ROPE.items() if key != "llama_4_scaling_beta"}


class TestMinistral3(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_ministral3,
        config=Ministral3Config,
        architecture=Ministral3ForCausalLM,
        published={
            "3b": (3_429_006_336, 3072, 26, 32, 8, 9216, 131072, 1e6, True),
            "8b": (8_489_553_920, 4096, 34, 32, 8, 14336, 131072, 1e6, False),
            "14b": (13_506_073_600, 5120, 40, 32, 8, 16384, 131072, 1e9, False),
        },
        settings={"pad_token_id": None, "head_dim": 8, "rope_parameters": ROPE},
        lengths=(1, 2, 4, 5, 6, 13),
        absent=["rope_parameters", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "sliding_window"],
        refused=[
            *(one for one in REFUSED if "rope_scaling" not in one[0]),
            ({"rope_parameters": WITHOUT}, "`rope_parameters.llama_4_scaling_beta` must be a finite number"),
            ({"rope_scaling": ROPE}, "`rope_scaling` and `rope_parameters` are both given and differ"),
        ],
        cases={
            "no window": {},
            "window, tied": {"sliding_window": 5, "tie_word_embeddings": True},
            "odd": {"hidden_size": 20, "head_dim": 6, "num_key_value_heads": 1},
        },
    )
