"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import surogate_model_granite
from transformers import GraniteConfig, GraniteForCausalLM

from surogate_testing.family_suite import NO_SHARE, REFUSED, SIZES, DenseFamilyTests, FamilyFacts

FACTORS = {"embedding_multiplier": 5.5, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 7.0}


class TestGranite(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_granite,
        config=GraniteConfig,
        architecture=GraniteForCausalLM,
        published={
            "3.3-2b": (2_533_539_840, 2048, 40, 32, 8, 8192, 49159, 1e7, True),
            "3.3-8b": (8_170_864_640, 4096, 40, 32, 8, 12800, 49159, 1e7, True),
        },
        settings=FACTORS,
        lengths=(1, 2, 13, 9),
        sizes=[size for size in SIZES if size != "num_key_value_heads"],
        absent=["num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
                "mlp_bias", "hidden_act", *FACTORS],
        refused=[
            *(one for one in (*REFUSED, NO_SHARE) if one[0] != {"head_dim": 15}),
            ({"logits_scaling": 0}, "`logits_scaling` must be a finite number"),
            ({"residual_multiplier": "0.2"}, "`residual_multiplier`.*must be a finite number"),
        ],
        cases={
            "untied": {},
            "tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
            "absent factors, odd": {**dict.fromkeys(FACTORS, 1.0), "hidden_size": 20, "num_attention_heads": 2,
                                    "num_key_value_heads": None},
        },
        exported={"attention_bias": True, "mlp_bias": True},
        long=["yarn"],
    )  # fmt: skip
