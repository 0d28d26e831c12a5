"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import pytest
import surogate_model_qwen2
from transformers import Qwen2Config, Qwen2ForCausalLM

from surogate_testing.family_suite import NO_SHARE, REFUSED, DenseFamilyTests, FamilyFacts


@pytest.mark.slow_cases("dynamic")
class TestQwen2(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_qwen2,
        config=Qwen2Config,
        architecture=Qwen2ForCausalLM,
        published={
            "0.5b": (494_032_768, 896, 24, 14, 2, 4864, 151936, 1e6, True),
            "1.5b": (1_543_714_304, 1536, 28, 12, 2, 8960, 151936, 1e6, True),
            "3b": (3_085_938_688, 2048, 36, 16, 2, 11008, 151936, 1e6, True),
            "7b": (7_615_616_512, 3584, 28, 28, 4, 18944, 152064, 1e6, False),
            "14b": (14_770_033_664, 5120, 48, 40, 8, 13824, 152064, 1e6, False),
            "32b": (32_763_876_352, 5120, 64, 40, 8, 27648, 152064, 1e6, False),
            "72b": (72_706_203_648, 8192, 80, 64, 8, 29568, 152064, 1e6, False),
        },
        refused=[*REFUSED, NO_SHARE],
        cases={
            "untied": {},
            "tied": {"tie_word_embeddings": True},
            "no grouped queries": {"num_key_value_heads": 4},
        },
        long=["yarn", "dynamic"],
    )
