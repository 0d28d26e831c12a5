"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import surogate_model_qwen3
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from surogate_testing.family_suite import DenseFamilyTests, FamilyFacts


@pytest.mark.slow_cases("dynamic", "untied, biases", "untied-recomputed", "tied, biases-recomputed")
class TestQwen3(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_qwen3,
        config=Qwen3Config,
        architecture=Qwen3ForCausalLM,
        published={
            "0.6b": (596_049_920, 1024, 28, 16, 8, 3072, 151936, 1e6, True),
            "1.7b": (1_720_574_976, 2048, 28, 16, 8, 6144, 151936, 1e6, True),
            "4b": (4_022_468_096, 2560, 36, 32, 8, 9728, 151936, 1e6, True),
            "8b": (8_190_735_360, 4096, 36, 32, 8, 12288, 151936, 1e6, False),
            "14b": (14_768_307_200, 5120, 40, 40, 8, 17408, 151936, 1e6, False),
            "32b": (32_762_123_264, 5120, 64, 64, 8, 25600, 151936, 1e6, False),
        },
        absent=["head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "hidden_act"],
        settings={"head_dim": 16},
        cases={
            "untied": {},
            "tied": {"tie_word_embeddings": True},
            "untied, biases": {"attention_bias": True},
            "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
        },
        exported={"attention_bias": True},
        long=["linear", "dynamic", "yarn", "llama3"],
    )

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_theta": 5e3},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
            {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e3}},
        ],
        ids=["transformers 4", "transformers 5", "nulls"],
    )
    def test_rope_theta_is_read_where_each_version_writes_it(self, rope: dict[str, Any]) -> None:
        config = self.facts.tiny(head_dim=16)
        del config["rope_theta"]
        model = self.facts.family.build({**config, **rope})
        tables = model.tables(torch.arange(4, dtype=torch.int32), torch.float32)
        angles = torch.arange(4.0)[:, None] / 5e3 ** (torch.arange(0, 16, 2) / 16)
        torch.testing.assert_close(tables["cos"], angles.cos())
        torch.testing.assert_close(tables["sin"], angles.sin())
