"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import surogate_model_llama
from transformers import LlamaConfig, LlamaForCausalLM

from surogate_testing.family_suite import NO_SHARE, REFUSED, SIZES, DenseFamilyTests, FamilyFacts


class TestLlama(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_llama,
        config=LlamaConfig,
        architecture=LlamaForCausalLM,
        published={
            "3.2-1b": (1_235_814_400, 2048, 16, 32, 8, 8192, 128256, 5e5, True),
            "3.2-3b": (3_212_749_824, 3072, 28, 24, 8, 8192, 128256, 5e5, True),
            "3.1-8b": (8_030_261_248, 4096, 32, 32, 8, 14336, 128256, 5e5, False),
            "3.1-70b": (70_553_706_496, 8192, 80, 64, 8, 28672, 128256, 5e5, False),
        },
        sizes=[size for size in SIZES if size != "num_key_value_heads"],
        absent=[
            "head_dim",
            "num_key_value_heads",
            "rope_theta",
            "rope_scaling",
            "rms_norm_eps",
            "tie_word_embeddings",
            "attention_bias",
            "mlp_bias",
            "hidden_act",
        ],
        refused=[*REFUSED, NO_SHARE],
        cases={
            "untied": {},
            "tied": {"tie_word_embeddings": True},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied, feed-forward bias": {"tie_word_embeddings": True, "mlp_bias": True},
            "no grouped queries": {"num_key_value_heads": 4},
            "head_dim": {"head_dim": 16},
        },
        exported={"attention_bias": True, "mlp_bias": True},
        long=["llama3", "yarn"],
    )
