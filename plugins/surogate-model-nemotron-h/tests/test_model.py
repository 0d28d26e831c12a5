"""The family's presets and refusals, its kinds of layers, and its parity with transformers and PEFT."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import surogate_model_nemotron_h
import torch
from surogate_model_nemotron_h.model import ATTENTION, MAMBA, MLP, MOE, build, kinds_of, time_step_limit
from transformers import NemotronHConfig, NemotronHForCausalLM

from surogate_core.plugin import UserError
from surogate_testing import tiny
from surogate_testing.family_suite import FamilyFacts, FamilyTests
from surogate_testing.parity import TOLERANCE

CHUNK = 64
"""Positions of a chunk of the scan, here and in transformers."""
DENSE = [MAMBA, MLP, ATTENTION, MAMBA]
CASES: dict[str, dict[str, Any]] = {
    "dense": {"layers_block_type": DENSE},
    "one group, odd sizes": {
        "layers_block_type": [MAMBA, ATTENTION, MLP],
        "hidden_size": 27,
        "mamba_num_heads": 3,
        "mamba_head_dim": 5,
        "n_groups": 1,
        "ssm_state_size": 7,
        "head_dim": 6,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "use_conv_bias": False,
    },
    "experts": {},
    "groups of experts, biases": {
        "layers_block_type": [MOE, ATTENTION, MAMBA],
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "use_bias": True,
        "mlp_bias": True,
    },
}
SIZES: dict[str, Any] = {
    "layers_block_type": [MAMBA, MOE, ATTENTION, MLP],
    "head_dim": 8,
    "ssm_state_size": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": CHUNK,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-9,  # transformers limits time steps by it, instead of by time_step_limit
    "experts_implementation": "eager",
}
PATTERNS = {
    "nano-9b-v2": (8_888_227_328, 4480, 56, 40, 8, 15_680),
    "nano-12b-v2": (12_310_001_152, 5120, 62, 40, 8, 20_480),
    "3-nano-4b": (3_973_556_832, 3136, 42, 40, 8, 12_544),
    "3-nano-30b-a3b": (31_577_940_288, 2688, 52, 32, 2, 1856),
}
SLOW = (
    "experts-recomputed",
    "one group, odd sizes",
    "groups of experts, biases",
    "dense-recomputed",
    "recomputed",
    "targets1",
)


def settle(model: Any) -> None:
    """Decays so slow that a state which crossed a border would show, and a choice in which every expert gets tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-5, -3, len(parameter)))
            elif name.endswith("dt_bias"):
                parameter.copy_(torch.linspace(-1, 1, len(parameter)))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.mul_(0.2)


@pytest.mark.slow_cases(*SLOW)
class TestNemotronH(FamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_nemotron_h,
        config=NemotronHConfig,
        architecture=NemotronHForCausalLM,
        published={name: (*sizes, 131_072, None, False) for name, sizes in PATTERNS.items()},
        sizes=[
            *("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
            *("mamba_num_heads", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("moe_shared_expert_intermediate_size", "hybrid_override_pattern"),
        ],
        refused=[
            ({"hybrid_override_pattern": "ME*X-"}, "`hybrid_override_pattern` has 'X' as layer 3; known: M .*Fix"),
            ({"hybrid_override_pattern": "ME*M"}, "has 4 layers, and `num_hidden_layers` is 5.*Fix"),
            ({"hybrid_override_pattern": ""}, "`hybrid_override_pattern` is ''.*Fix"),
            ({"layers_block_type": ["mamba", "moe", "attention", "mlp", "mlp"]}, "contradict each other .layer 3.*Fix"),
            ({"layers_block_type": ["mamba"]}, r"contradict each other \(1 layers and 5\).*Fix"),
            ({"layers_block_type": ["mamba", "gru"]}, "has 'gru' as layer 1.*Fix"),
            ({"layers_block_type": "ME"}, "`layers_block_type` is 'ME'.*Fix"),
            ({"time_step_limit": [0.1]}, "`time_step_limit` is .*Fix"),
            ({"time_step_limit": [0.1, 0.0]}, "`time_step_limit` is .*Fix"),
            ({"n_groups": 3}, r"`mamba_num_heads` \(8\) must be a multiple of `n_groups` \(3\).*Fix"),
            ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads`"),
            ({"n_group": 3}, r"`n_routed_experts` \(8\) must be a multiple of `n_group` \(3\).*Fix"),
            ({"topk_group": 2}, r"`topk_group` \(2\) is larger than `n_group` \(1\).*Fix"),
            ({"num_experts_per_tok": 9}, r"`num_experts_per_tok` \(9\) is larger than the 8 experts.*Fix"),
            ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "is larger than the 2 experts.*Fix"),
            ({"conv_kernel": 3}, "`conv_kernel` is 3, and nemotron-h computes 4 alone"),
            ({"mlp_hidden_act": "silu"}, "`mlp_hidden_act` is 'silu', and nemotron-h computes 'relu2' alone"),
            ({"tie_word_embeddings": True}, "`tie_word_embeddings` is True"),
            ({"sliding_window": 16}, "`sliding_window` is 16"),
            ({"moe_latent_size": 64}, "`moe_latent_size` is 64: experts in a narrower space"),
            ({"attention_dropout": 0.1}, "`attention_dropout`.*Fix"),
            ({"hidden_size": "big"}, "`hidden_size` must be a positive integer, not 'big'"),
        ],
        settings=SIZES,
        lengths=(1, 2, CHUNK - 1, CHUNK, CHUNK + 1),
        settled=settle,
        cases=CASES,
        exported={"layers_block_type": [MAMBA, MLP, ATTENTION]},
        targets=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "up_proj", "down_proj"),
    )

    def test_absent_keys_have_the_defaults_of_transformers(self) -> None:
        absent = (
            *("layer_norm_epsilon", "conv_kernel", "use_conv_bias", "use_bias", "mlp_bias", "tie_word_embeddings"),
            *("n_group", "topk_group", "norm_topk_prob", "time_step_min", "time_step_max", "time_step_floor"),
        )
        config = {key: value for key, value in self.facts.tiny(head_dim=128).items() if key not in absent}
        theirs, model = self.facts.config(**config), build(config)
        assert self.facts.tensors(config) == self.facts.expected(config)
        assert model.head.eps.value(model.config) == theirs.layer_norm_epsilon
        for key in absent[6:]:
            assert model.config.get(key, True) == getattr(theirs, key)
        assert time_step_limit(model.config) == tuple(theirs.time_step_limit) == (0, math.inf)

    @pytest.mark.slow
    def test_documents_text_and_export_with_experts(self, tmp_path: Path) -> None:
        pair = self.facts.pair(self.facts.short)
        assert not pair.leaks()
        own, theirs = pair.greedy(24)
        assert own == theirs
        assert pair.full_export_error(tmp_path / "model") <= TOLERANCE

    def test_norms_are_rounded_as_by_transformers(self) -> None:
        """Once, behind the weight: in bf16 the logits of layers with feed-forwards are those of transformers' to the
        bit.
        """
        pair = self.facts.pair((29,), layers_block_type=[MLP, MLP])
        (document,) = pair.documents
        own = pair.engine(dtype=torch.bfloat16).logits(tiny.batch([document], tokens=pair.tokens))[: len(document)]
        with torch.no_grad():
            theirs = pair.reference.bfloat16()(input_ids=torch.tensor([document]), use_cache=False).logits[0]
        assert torch.equal(own.float(), theirs.float())

    @pytest.mark.slow
    def test_time_steps_are_limited_as_the_file_says(self) -> None:
        limit = (0.5, 0.9)
        pair = self.facts.pair(layers_block_type=DENSE, time_step_limit=list(limit))
        plain = pair.logits_error()
        for layer in pair.reference.model.layers:
            if hasattr(layer.mixer, "time_step_limit"):
                layer.mixer.time_step_limit = limit
        assert plain > 100 * TOLERANCE, "the limits must matter"
        assert pair.logits_error() <= TOLERANCE
        error, name = pair.gradient_error(recompute=False)
        assert error <= TOLERANCE, name

    @pytest.mark.slow
    def test_a_state_that_crossed_a_border_would_show(self) -> None:
        """In transformers' packed forward it does, by more than 1e-3."""
        pair = self.facts.pair((CHUNK, CHUNK + 1), layers_block_type=DENSE)
        assert not pair.leaks()
        with torch.no_grad():
            packed = pair.reference(input_ids=torch.tensor([[i for ids in pair.documents for i in ids]])).logits[0]
            alone = pair.reference(input_ids=torch.tensor([pair.documents[1]])).logits[0]
        assert (packed[CHUNK:] - alone).abs().max() > 1e-3

    @pytest.mark.parametrize("targets", [("in_proj", "q_proj", "up_proj"), ("q_proj", "o_proj", "down_proj")])
    def test_the_exported_adapter(self, tmp_path: Path, targets: tuple[str, ...]) -> None:
        pair = self.facts.pair(layers_block_type=DENSE)
        assert pair.own_adapter_error(tmp_path / "adapter", targets) <= TOLERANCE


def test_layers_are_read_as_each_version_writes_them() -> None:
    kinds = [MAMBA, MOE, ATTENTION, MLP]
    pattern, older = {"hybrid_override_pattern": "ME*-"}, ["mamba", "moe", "attention", "mlp"]
    for config in (
        pattern,
        {"layers_block_type": older},
        {"layer_types": kinds},
        {**pattern, "layers_block_type": older},
    ):
        assert kinds_of(config) == kinds
        assert kinds_of({**config, "num_hidden_layers": 4}) == kinds
        with pytest.raises(UserError, match="has 4 layers, and `num_hidden_layers` is 5"):
            kinds_of({**config, "num_hidden_layers": 5})


def test_limits_of_time_steps_are_read_as_each_version_writes_them() -> None:
    for high in (math.inf, "Infinity", {"__float__": "Infinity"}):
        assert time_step_limit({"time_step_limit": [0.0, high]}) == (0, math.inf)
    assert build({**TestNemotronH.facts.tiny(), "mamba_dt_limit": [0.25, 2]}).config["time_step_limit"] == [0.25, 2]
