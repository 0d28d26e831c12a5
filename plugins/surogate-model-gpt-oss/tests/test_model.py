"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import surogate_model_gpt_oss
from transformers import GptOssConfig, GptOssForCausalLM

from surogate_testing.family_suite import REFUSED, FamilyFacts, FamilyTests
from surogate_testing.parity import TOLERANCE

WINDOW = 5
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 500.0}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn without truncation": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 3.0, "beta_slow": 0.2}},
    "no biases, tied": {"attention_bias": False, "tie_word_embeddings": True},
    "odd sizes": {"hidden_size": 33, "head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 1},
    "every expert": {"num_experts_per_tok": 5, "intermediate_size": 7},
    "narrow limits": {"swiglu_limit": 0.3, "swiglu_alpha": 1.1, "num_experts_per_tok": 3},
}


@pytest.mark.slow_cases("every expert-kept", "odd sizes-kept", "no biases, tied-recomputed", "narrow limits-recomputed")
class TestGptOss(FamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_gpt_oss,
        config=GptOssConfig,
        architecture=GptOssForCausalLM,
        published={
            "20b": (20_914_757_184, 2880, 24, 64, 8, 2880, 201_088, 150_000, False),
            "120b": (116_829_156_672, 2880, 36, 64, 8, 2880, 201_088, 150_000, False),
        },
        sizes=[
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("num_local_experts", "vocab_size"),
        ],
        absent=[
            *("rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "head_dim", "attention_bias"),
            *("swiglu_limit", "num_experts_per_tok", "sliding_window", "max_position_embeddings"),
        ],
        refused=[
            *(one for one in REFUSED if not {"layer_types", "use_sliding_window"} & one[0].keys()),
            ({"num_experts_per_tok": 9}, r"`num_experts_per_tok` \(9\) is larger than `num_local_experts` \(8\)\. Fix"),
            ({"num_local_experts": 0}, "`num_local_experts` must be a positive integer, not 0"),
            ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries, and the model has 4 layers"),
            ({"sliding_window": 0}, "`sliding_window` is 0"),
        ],
        settings={
            "head_dim": 16,
            "intermediate_size": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "experts_implementation": "eager",
        },
        lengths=(WINDOW - 1, WINDOW, WINDOW + 1, 13),
        cases=CASES,
        exported={"num_hidden_layers": 2},
    )

    @pytest.mark.slow_cases("attention", "down")
    @pytest.mark.parametrize(
        "targets", [ATTENTION + EXPERTS, ATTENTION, EXPERTS, EXPERTS[1:]], ids=["all", "attention", "experts", "down"]
    )
    def test_the_exported_adapter(self, tmp_path: Path, targets: tuple[str, ...]) -> None:
        error = self.facts.pair(**self.facts.exported).own_adapter_error(tmp_path / "adapter", targets)
        assert error <= TOLERANCE
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        named = [f"mlp.experts.{name}" for name in EXPERTS if name in targets]
        assert config.get("target_parameters", []) == named

    def test_experts_with_a_rank_of_their_own_and_trained_routers(self, tmp_path: Path) -> None:
        pair = self.facts.pair(**self.facts.exported)
        assert (
            pair.own_adapter_error(tmp_path / "a", ATTENTION + EXPERTS, expert_rank=2, train_router=True) <= TOLERANCE
        )
