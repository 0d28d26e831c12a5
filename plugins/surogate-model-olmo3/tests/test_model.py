"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import surogate_model_olmo3
from transformers import Olmo2Config, Olmo2ForCausalLM, Olmo3Config, Olmo3ForCausalLM

from surogate_testing.family_suite import NO_SHARE, REFUSED, SIZES, DenseFamilyTests, FamilyFacts
from surogate_testing.parity import TINY, TOLERANCE, ModelPair

REFUSALS = [one for one in REFUSED if "layer_types" not in one[0] and one[0] != {"head_dim": 15}]
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "attention_factor": 1.2}
PLAIN = {"rope_type": "default", "rope_theta": 5000.0}
LONGER = {**YARN, "rope_theta": 100.0}
FLAT = {"rope_parameters": None, "rope_scaling": YARN}


class TestOlmo3(DenseFamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_olmo3,
        config=Olmo3Config,
        architecture=Olmo3ForCausalLM,
        published={
            "7b": (7_298_011_136, 4096, 32, 32, 32, 11008, 100278, 5e5, False),
            "32b": (32_233_522_176, 5120, 64, 40, 8, 27648, 100278, 5e5, False),
            "2-1b": (1_484_916_736, 2048, 16, 16, 16, 8192, 100352, 5e5, False),
            "2-7b": (7_298_617_344, 4096, 32, 32, 32, 11008, 100352, 5e5, False),
            "2-13b": (13_716_198_400, 5120, 40, 40, 40, 13824, 100352, 5e5, False),
            "2-32b": (32_234_279_936, 5120, 64, 40, 8, 27648, 100352, 5e5, False),
        },
        # Rows are not normed before q and k. With smaller ones biases are all that fp32 shows of these.
        settings={"pad_token_id": None, "initializer_range": 0.3, "sliding_window": 5, "layer_types": MIXED, **FLAT},
        lengths=(1, 2, 4, 5, 6, 13),
        sizes=[size for size in SIZES if size != "num_key_value_heads"],
        absent=["num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "attention_bias",
                "hidden_act", "sliding_window"],
        refused=[
            *REFUSALS,
            NO_SHARE,
            ({"layer_types": MIXED}, "`layer_types` has 3 entries, and the model has 4 layers"),
            ({"sliding_window": None}, "`layer_types` has layers with a sliding window, and `sliding_window` is None"),
            ({"rope_theta": 1e4}, "`rope_theta` is 10000.0, and layers with a window have 500000"),
            ({"rope_parameters": PLAIN, "rope_scaling": None}, "`rope_parameters` of olmo3 has a RoPE for each"),
        ],
        cases={
            "YaRN without a window, plain with one": {},
            "two bases": {"rope_parameters": {"full_attention": LONGER, "sliding_attention": PLAIN},
                          "rope_scaling": None, "attention_bias": True},
            "absent types, tied": {"layer_types": None, "num_hidden_layers": 4, "tie_word_embeddings": True},
            "full alone, odd": {"layer_types": ["full_attention"] * 3, "hidden_size": 20, "num_attention_heads": 2,
                                "num_key_value_heads": 2},
        },
        exported={"attention_bias": True},
    )  # fmt: skip


@pytest.mark.parametrize("nested", [{"full_attention": YARN}, {"sliding_attention": PLAIN, "full_attention": None}])
def test_a_type_without_a_rope_has_the_plain_one(nested: dict[str, Any]) -> None:
    assert TestOlmo3.facts.pair(rope_scaling=None, rope_parameters=nested).logits_error() <= TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True},
        {"num_key_value_heads": None, "hidden_size": 20, "num_attention_heads": 2},
    ],
    ids=["untied", "tied, biases", "no grouped queries, odd"],
)
def test_olmo2_equals_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {**TINY, "rope_parameters": {**PLAIN}, "pad_token_id": None, "eos_token_id": 7, "initializer_range": 0.3}
    config = Olmo2Config(architectures=["Olmo2ForCausalLM"], **{**settings, **changes})
    pair = ModelPair.of(Olmo2ForCausalLM, config, surogate_model_olmo3.surogate_model_family().build)
    assert pair.logits_error() <= TOLERANCE
    error, name = pair.gradient_error(recompute=True)
    assert error <= TOLERANCE, name
    assert not pair.leaks()
    assert pair.full_export_error(tmp_path / "model") <= TOLERANCE
    own, theirs = pair.greedy(12)
    assert own == theirs
