"""The family's presets and refusals, and its parity with transformers and PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import surogate_model_qwen3_5
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from surogate_core.plugin import UserError
from surogate_testing import tiny
from surogate_testing.family_suite import REFUSED, FamilyFacts, FamilyTests
from surogate_testing.parity import TOLERANCE, Record

CHUNK = 64
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SETTINGS: dict[str, Any] = {
    "experts_implementation": "eager",
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 20,
}
CASES: dict[str, dict[str, Any]] = {
    "two heads of values for each of keys": {},
    "as many heads of values as of keys": {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
    "three heads of values for one of keys, tied, with biases": {
        "linear_num_key_heads": 1, "linear_num_value_heads": 3, "tie_word_embeddings": True, "attention_bias": True,
    },
}  # fmt: skip


def slow_decays(model: Any) -> None:
    """States keep half of their values for 14 to 100 tokens, so that a leak between documents shows."""
    for name, parameter in model.named_parameters():
        if name.endswith((".A_log", ".dt_bias")):
            low, high = (-4.5, -2.5) if name.endswith(".A_log") else (-1.0, 1.0)
            parameter.copy_(torch.linspace(low, high, len(parameter)))


SHORT = (5, 2, 1, 9)
"""Lengths of documents where long ones show no more."""


@pytest.mark.slow_cases(*list(CASES)[1:], "kept")
class TestQwen35(FamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_qwen3_5,
        config=Qwen3_5TextConfig,
        architecture=Qwen3_5ForCausalLM,
        published={
            "9b": (8_953_803_264, 4096, 32, 16, 4, 12_288, 248_320, 1e7, False),
            "35b-a3b": (34_660_610_688, 2048, 40, 16, 2, 512, 248_320, 1e7, False),
        },
        absent=[
            *("rms_norm_eps", "tie_word_embeddings", "hidden_act", "attn_output_gate", "full_attention_interval"),
            *("attention_bias", "rope_parameters"),
        ],
        refused=[
            *(one for one in REFUSED if not {"rope_scaling", "layer_types"} & one[0].keys()),
            ({"linear_num_value_heads": 5}, r"`linear_num_value_heads` \(5\) must be a multiple of .* \(2\)\. Fix"),
            ({"linear_conv_kernel_dim": 1}, "`linear_conv_kernel_dim` must be at least 2, not 1"),
            ({"linear_key_head_dim": 0}, "`linear_key_head_dim` must be a positive integer, not 0"),
            ({"full_attention_interval": 0}, "`full_attention_interval` must be a positive integer, not 0"),
            ({"layer_types": ["full_attention"]}, "`layer_types` has 1 entries, and the model has 4 layers"),
            ({"layer_types": ["sliding_attention"] * 4}, "type `sliding_attention`, and only linear_attention and"),
            ({"attn_output_gate": False}, "`attn_output_gate` is False, and qwen3-5 computes True"),
            ({"num_experts": 4}, "`num_experts` is 4: experts"),
            ({"head_dim": 6}, "`partial_rotary_factor` is 0.5: 3 of 6 features"),
        ],
        settings=SETTINGS,
        settled=slow_decays,
        lengths=(1, 2, CHUNK - 1, CHUNK, CHUNK + 1),
        cases=CASES,
        targets=(*ATTENTION, *MLP, *DELTA),
    )

    def test_greedy_text(self) -> None:
        own, theirs = self.facts.pair(SHORT).greedy(12)
        assert own == theirs

    @pytest.mark.slow
    def test_greedy_text_behind_prompts_around_a_chunk(self) -> None:
        own, theirs = self.facts.pair().greedy(24)
        assert own == theirs

    @pytest.mark.slow
    def test_the_exported_adapter(self, tmp_path: Path) -> None:
        pair = self.facts.pair((13, 9), tie_word_embeddings=True)
        assert pair.adapter_export_error(tmp_path / "adapter", targets=self.facts.targets) <= TOLERANCE

    def test_a_leak_of_one_state_would_show(self) -> None:
        """Two documents as one: the second shows what the delta rule reads of the first, beyond the convolution."""
        pair = self.facts.pair((CHUNK, 20), layer_types=["linear_attention"] * 3)
        first, second = map(list, pair.documents)
        engine = pair.engine()
        apart, together = (
            engine.logits(tiny.batch(documents, tokens=pair.tokens))[CHUNK + 10 : CHUNK + 20].clone()
            for documents in ([first, second], [first + second])
        )
        assert tiny.relative_error(together, apart) > 1e-3


MOE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("moe", {}),
    "every expert, three heads of values for one of keys": (
        "moe", {"num_experts_per_tok": 5, "linear_num_key_heads": 1, "linear_num_value_heads": 3},
    ),
    "Qwen3-Next": ("next", {"mlp_only_layers": [2]}),
    "Qwen3-Next, as many heads of values as of keys": (
        "next", {"linear_num_value_heads": 2, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "Qwen3-Next, three heads of values for one of keys": (
        "next", {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "tie_word_embeddings": True},
    ),
}  # fmt: skip
KINDS = {
    "moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}


def facts(kind: str) -> FamilyFacts:
    """What models with experts, and those of Qwen3-Next, are."""
    config, architecture = KINDS[kind]
    return FamilyFacts(
        plugin=surogate_model_qwen3_5,
        config=config,
        architecture=architecture,
        published={},
        cases={},
        settings={**SETTINGS, **EXPERTS},
        settled=slow_decays,
        lengths=(1, 2, CHUNK - 1, CHUNK, CHUNK + 1),
    )


class TestExperts:
    @pytest.mark.parametrize("kind", KINDS)
    def test_logits(self, kind: str) -> None:
        assert facts(kind).pair(SHORT).logits_error() <= TOLERANCE

    @pytest.mark.slow
    @pytest.mark.parametrize("case", MOE_CASES)
    def test_logits_and_every_gradient(self, case: str, record_testsuite_property: Record) -> None:
        kind, changes = MOE_CASES[case]
        pair = facts(kind).pair(**changes)
        logits, (gradient, name) = pair.logits_error(), pair.gradient_error(recompute=False)
        record_testsuite_property(case, f"logits {logits:.2e}, gradient {gradient:.2e} {name}")
        assert logits <= TOLERANCE
        assert gradient <= TOLERANCE, name

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)
    def test_documents_do_not_see_each_other_and_text_is_that_of_transformers(self, kind: str) -> None:
        pair = facts(kind).pair(SHORT)
        assert not pair.leaks()
        own, theirs = pair.greedy(12)
        assert own == theirs

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_exported_model(self, kind: str, tmp_path: Path) -> None:
        assert facts(kind).pair(SHORT).full_export_error(tmp_path / "model") <= TOLERANCE

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("kind", "targets"),
        [
            ("moe", (*ATTENTION, *DELTA)),
            ("moe", ("all",)),
            ("moe", ("up_proj",)),
            ("moe", ("mlp",)),
            ("next", ("all",)),
            ("next", (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj")),
        ],
    )
    def test_the_exported_adapter(self, kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
        assert facts(kind).pair(SHORT).own_adapter_error(tmp_path / "adapter", targets) <= TOLERANCE

    def test_what_the_blocks_do_not_compute_is_refused(self) -> None:
        small = surogate_model_qwen3_5.surogate_model_family().presets["tiny"]
        moe = {**small, **EXPERTS, "model_type": "qwen3_5_moe_text"}
        following = {**moe, "model_type": "qwen3_next"}
        for config, message in (
            ({**moe, "num_experts_per_tok": 6}, r"`num_experts_per_tok` \(6\) is larger than `num_experts` \(5\)"),
            ({**moe, "num_experts": 0}, "`num_experts` must be a positive integer, not 0"),
            ({**moe, "norm_topk_prob": False}, "`norm_topk_prob` is False, and qwen3-5 computes True"),
            ({**following, "norm_topk_prob": "yes"}, "`norm_topk_prob` is 'yes', and must be true or false"),
            ({**following, "mlp_only_layers": [4]}, r"`mlp_only_layers` is \[4\]; it lists layers from 0 to 3"),
            ({**following, "decoder_sparse_step": 0}, "`decoder_sparse_step` must be a positive integer, not 0"),
        ):
            with pytest.raises(UserError, match=message):
                surogate_model_qwen3_5.surogate_model_family().build(config)
