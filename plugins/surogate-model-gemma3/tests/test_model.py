"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import surogate_model_gemma3
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from surogate_core.plugin import UserError
from surogate_testing.family_suite import REFUSED, DenseFamilyTests, FamilyFacts

ROPES = ("full_attention", "sliding_attention")
WINDOW = 5
PARAMETERS = {
    "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
ODD = {"head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 33, "intermediate_size": 47}


@pytest.mark.slow_cases("dynamic", "yarn", "odd sizes-recomputed", "untied, biases-kept")
class TestGemma3(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_gemma3,
        config=Gemma3TextConfig,
        architecture=Gemma3ForCausalLM,
        published={
            "270m": (268_098_176, 640, 18, 4, 1, 2048, 262_144, 1e6, True),
            "1b": (999_885_952, 1152, 26, 4, 1, 6912, 262_144, 1e6, True),
            "4b": (3_880_263_168, 2560, 34, 8, 4, 10_240, 262_208, 1e6, True),
            "12b": (11_766_034_176, 3840, 48, 16, 8, 15_360, 262_208, 1e6, True),
            "27b": (27_009_346_304, 5376, 62, 32, 16, 21_504, 262_208, 1e6, True),
        },
        sizes=["hidden_size", "intermediate_size", "num_hidden_layers"],
        absent=[
            *("rope_theta", "rope_local_base_freq", "rms_norm_eps", "tie_word_embeddings", "hidden_activation"),
            *("head_dim", "vocab_size", "num_key_value_heads", "sliding_window", "attention_bias"),
            *("query_pre_attn_scalar", "max_position_embeddings", "num_attention_heads"),
        ],
        refused=[
            *(one for one in REFUSED if not {"hidden_act", "layer_types", "use_sliding_window"} & one[0].keys()),
            ({"hidden_activation": "silu"}, "`hidden_activation` is 'silu', and gemma3 computes 'gelu_pytorch_tanh'"),
            ({"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping`.*soft cap"),
            ({"use_bidirectional_attention": True}, "`use_bidirectional_attention`.*later tokens"),
            ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries, and the model has 4 layers"),
            (
                {"layer_types": ["full_attention"] * 3 + ["linear_attention"]},
                "`layer_types` has layers of type `linear_attention`",
            ),
        ],
        settings={
            "head_dim": 16,
            "pad_token_id": None,  # transformers gives its row no gradient where the token occurs
            "rope_parameters": PARAMETERS,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
        },
        lengths=(WINDOW - 1, WINDOW, WINDOW + 1, 13),
        cases={
            "tied": {"tie_word_embeddings": True},
            "untied, biases": {"tie_word_embeddings": False, "attention_bias": True},
            "soft cap": {"final_logit_softcapping": 3.0},
            "odd sizes": {**ODD, "final_logit_softcapping": 30.0},
        },
        exported={"final_logit_softcapping": 3.0},
        long=["linear", "dynamic", "yarn", "llama3"],
        ropes=ROPES,
    )

    def test_the_pattern_is_read_under_each_name(self) -> None:
        config = self.facts.tiny(num_hidden_layers=6)
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            kinds = self.facts.family.build({**config, key: 3}).layer_types  # type: ignore[attr-defined]
            theirs = self.facts.config(num_hidden_layers=6, sliding_window_pattern=3)
            assert list(kinds) == theirs.layer_types

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_theta": 5e3, "rope_local_base_freq": 5e2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"rope_parameters": {**PARAMETERS, "full_attention": {"rope_type": "linear", "factor": 8.0}}},
        ],
        ids=["transformers 4", "transformers 5"],
    )
    def test_rope_is_read_where_each_version_writes_it(self, rope: dict[str, Any]) -> None:
        settings = {key: value for key, value in self.facts.settings.items() if key != "rope_parameters"}
        pair = self.facts.pair(**{**settings, "rope_parameters": None, **rope})
        assert pair.logits_error() <= 1e-5

    def test_a_scaling_for_all_layers_is_refused(self) -> None:
        model = self.facts.family.build(self.facts.tiny(rope_parameters=PARAMETERS))
        with pytest.raises(UserError, match="rope_scaling: the model has a RoPE for each type of its layers"):
            model.stretched("yarn", 8192)

    @pytest.mark.parametrize(
        "changes",
        [
            {"sliding_window_pattern": 2},
            {"rope_local_base_freq": 5e3},
            {"query_pre_attn_scalar": 24},
            {"final_logit_softcapping": 30.0},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_what_llama_cpp_lacks_is_refused(self, changes: dict[str, Any]) -> None:
        describe = self.facts.family.exports["gguf"]
        fitting = self.facts.tiny(sliding_window_pattern=6)
        assert describe(fitting)["arch"] == "gemma3"
        with pytest.raises(UserError, match=r"--format gguf: config\.json: `.*llama\.cpp"):
            describe({**fitting, **changes})
