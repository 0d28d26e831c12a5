"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import surogate_model_gemma4
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from surogate_testing.family_suite import REFUSED, FamilyFacts, FamilyTests
from surogate_testing.parity import TOLERANCE

WINDOW = 5
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 5,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
}
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "values of their own, biases, untied": {
        "attention_k_eq_v": False, "attention_bias": True, "tie_word_embeddings": False, "global_head_dim": 16,
    },
    "odd sizes": {
        "hidden_size": 33, "head_dim": 6, "global_head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1,
        "intermediate_size": 7, "final_logit_softcapping": 3.0,
    },
    "experts": EXPERTS,
    "every expert": {**EXPERTS, "top_k_experts": 5, "final_logit_softcapping": 3.0},
}  # fmt: skip


@pytest.mark.slow_cases("every expert-kept", "every expert-recomputed", "odd sizes-recomputed", "dense-kept")
class TestGemma4(FamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_gemma4,
        config=Gemma4TextConfig,
        architecture=Gemma4ForCausalLM,
        published={
            "26b-a4b": (25_233_141_790, 2816, 30, 16, 8, 2112, 262_144, None, True),
            "31b": (30_697_345_340, 5376, 60, 32, 16, 21_504, 262_144, None, True),
        },
        sizes=["hidden_size", "intermediate_size", "num_hidden_layers", "num_experts", "top_k_experts"],
        absent=[
            *("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "hidden_activation", "vocab_size"),
            *("max_position_embeddings", "sliding_window", "attention_bias", "num_attention_heads"),
        ],
        refused=[
            *(one for one in REFUSED if not {"hidden_act", "layer_types", "rope_scaling"} & one[0].keys()),
            ({"hidden_size_per_layer_input": 256}, "`hidden_size_per_layer_input` is 256: an input of each layer"),
            ({"hidden_size_per_layer_input": None}, "`hidden_size_per_layer_input` is 256: an input of each layer"),
            ({"num_kv_shared_layers": 2}, "`num_kv_shared_layers` is 2: keys and values that layers share"),
            ({"use_bidirectional_attention": "all"}, "`use_bidirectional_attention` is 'all'"),
            ({"hidden_activation": "silu"}, "`hidden_activation` is 'silu', and gemma4 computes 'gelu_pytorch_tanh'"),
            ({"top_k_experts": 9}, r"`top_k_experts` \(9\) is larger than `num_experts` \(8\)\. Fix"),
            ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries, and the model has 4 layers"),
            ({"per_layer_config": {"0": {"head_dim": 8}}}, "`per_layer_config` has other sizes"),
            ({"per_layer_config": {"1": {"hidden_size": 8}, "3": {"hidden_size": 8}}}, "`per_layer_config` has other"),
        ],
        settings={
            "attention_k_eq_v": True,
            "experts_implementation": "eager",
            "global_head_dim": 24,
            "head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_global_key_value_heads": 1,
            "pad_token_id": None,  # transformers gives its row no gradient where the token occurs
            "rope_parameters": ROPES,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 61,
        },
        lengths=(WINDOW - 1, WINDOW, WINDOW + 1, 13),
        cases=CASES,
        exported=EXPERTS,
        ropes=("sliding_attention",),
    )

    @pytest.mark.parametrize(
        ("targets", "changes"),
        [
            ((*ATTENTION, *MLP), {"attention_k_eq_v": False}),
            (("all",), EXPERTS),
            (("attention", "mlp"), EXPERTS),
        ],
        ids=["dense", "experts", "beside experts"],
    )
    def test_the_exported_adapter(self, tmp_path: Path, targets: tuple[str, ...], changes: dict[str, Any]) -> None:
        assert self.facts.pair(**changes).own_adapter_error(tmp_path / "adapter", targets) <= TOLERANCE
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        named = ["experts.gate_up_proj", "experts.down_proj"] if targets == ("all",) else []
        assert config.get("target_parameters", []) == named
