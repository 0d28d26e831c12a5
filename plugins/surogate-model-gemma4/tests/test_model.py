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
SHARED: dict[str, Any] = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 12,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
"""Layers of both types whose keys and values are those of the first two."""
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "values of their own, biases, untied": {
        "attention_k_eq_v": False, "attention_bias": True, "tie_word_embeddings": False, "global_head_dim": 16,
    },
    "odd sizes": {
        "hidden_size": 33, "head_dim": 6, "global_head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 1,
        "intermediate_size": 7, "final_logit_softcapping": 3.0,
    },
    "inputs of layers": {"hidden_size_per_layer_input": 9, "vocab_size_per_layer_input": 67},
    "shared": SHARED,
    "shared, experts, keys as values": {**SHARED, **EXPERTS, "attention_k_eq_v": True, "use_double_wide_mlp": False},
    "experts": EXPERTS,
    "every expert": {**EXPERTS, "top_k_experts": 5, "final_logit_softcapping": 3.0},
}  # fmt: skip


@pytest.mark.slow_cases(
    *("every expert-kept", "every expert-recomputed", "odd sizes-recomputed", "dense-kept", "inputs of layers"),
    *("all of shared layers", "shared-kept", "shared, experts, keys as values"),
)
class TestGemma4(FamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_gemma4,
        config=Gemma4TextConfig,
        architecture=Gemma4ForCausalLM,
        published={
            "e2b": (4_628_569_379, 1536, 35, 8, 1, 6144, 262_144, None, True),
            "e4b": (7_463_013_418, 2560, 42, 8, 2, 10_240, 262_144, None, True),
            "26b-a4b": (25_233_141_790, 2816, 30, 16, 8, 2112, 262_144, None, True),
            "31b": (30_697_345_340, 5376, 60, 32, 16, 21_504, 262_144, None, True),
        },
        sizes=["hidden_size", "intermediate_size", "num_hidden_layers", "num_experts", "top_k_experts"],
        absent=[
            *("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "hidden_activation", "vocab_size"),
            *("max_position_embeddings", "sliding_window", "attention_bias", "num_attention_heads"),
            "vocab_size_per_layer_input",
        ],
        refused=[
            *(one for one in REFUSED if not {"hidden_act", "layer_types", "rope_scaling"} & one[0].keys()),
            (
                {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 8},
                "`vocab_size_per_layer_input` is 8, and `vocab_size` 1024: tokens",
            ),
            ({"num_kv_shared_layers": 4}, "`num_kv_shared_layers` is 4, and the model has 4 layers"),
            ({"num_kv_shared_layers": 3}, "`num_kv_shared_layers` is 3, and no layer of type `full_attention` is"),
            ({"hidden_size_per_layer_input": None}, "`hidden_size_per_layer_input` is null, and must.*Fix"),
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
        exported={**SHARED, **EXPERTS},
        ropes=("sliding_attention",),
    )

    @pytest.mark.slow_cases("beside experts")
    @pytest.mark.parametrize(
        ("targets", "changes"),
        [
            ((*ATTENTION, *MLP), {"attention_k_eq_v": False}),
            (("all",), EXPERTS),
            (("attention", "mlp"), EXPERTS),
            (("all",), SHARED),
        ],
        ids=["dense", "experts", "beside experts", "all of shared layers"],
    )
    def test_the_exported_adapter(self, tmp_path: Path, targets: tuple[str, ...], changes: dict[str, Any]) -> None:
        assert self.facts.pair(**changes).own_adapter_error(tmp_path / "adapter", targets) <= TOLERANCE
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        named = ["experts.gate_up_proj", "experts.down_proj"] if "all" in targets and changes == EXPERTS else []
        assert config.get("target_parameters", []) == named

    @pytest.mark.slow
    def test_greedy_text_of_dense_layers_that_share(self) -> None:
        found, expected = self.facts.pair(**SHARED).greedy(3 * WINDOW)
        assert found == expected
