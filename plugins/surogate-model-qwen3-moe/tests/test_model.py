"""The family's presets and refusals, its kinds of layers, and its parity with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import surogate_model_qwen3_moe
from surogate_model_qwen3_moe.model import PlainBlock, SparseBlock, build
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from surogate_core.plugin import UserError
from surogate_testing.family_suite import NO_SHARE, REFUSED, FamilyFacts, FamilyTests

CASES: dict[str, dict[str, Any]] = {
    "dense and sparse layers": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "probabilities as they are": {"decoder_sparse_step": 2},
    "tied, with biases": {"tie_word_embeddings": True, "attention_bias": True},
    "every expert": {"num_experts": 5, "num_experts_per_tok": 5, "norm_topk_prob": True},
    "one expert a token": {"num_experts_per_tok": 1},
}
SLOW = [f"{name}-{how}" for name in list(CASES)[2:] for how in ("kept", "recomputed")]


@pytest.mark.slow_cases("every expert", "tied, with biases", *SLOW)
class TestQwen3Moe(FamilyTests):
    facts = FamilyFacts(
        plugin=surogate_model_qwen3_moe,
        config=Qwen3MoeConfig,
        architecture=Qwen3MoeForCausalLM,
        published={
            "30b-a3b": (30_532_122_624, 2048, 48, 32, 4, 6144, 151936, 1e6, False),
            "235b-a22b": (235_093_634_560, 4096, 94, 64, 4, 12288, 151936, 1e6, False),
        },
        sizes=["hidden_size", "num_attention_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"],
        absent=["head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "norm_topk_prob", "hidden_act"],
        refused=[
            *REFUSED,
            NO_SHARE,
            ({"num_experts_per_tok": 9}, r"`num_experts_per_tok` \(9\) is larger than `num_experts` \(8\)\. Fix"),
            ({"num_experts": 0}, "`num_experts` must be a positive integer, not 0"),
            ({"num_experts_per_tok": 0}, "`num_experts_per_tok` must be a positive integer, not 0"),
            ({"decoder_sparse_step": 0}, "`decoder_sparse_step` must be a positive integer, not 0"),
            ({"mlp_only_layers": [0, 1, 2]}, "no layer has experts.*`mlp_only_layers`.*Fix"),
            ({"decoder_sparse_step": 5}, "no layer has experts.*`decoder_sparse_step`.*Fix"),
            ({"mlp_only_layers": [4]}, r"`mlp_only_layers` is \[4\]; it lists layers from 0 to 2\. Fix"),
            ({"mlp_only_layers": "0"}, "`mlp_only_layers` is '0'.*Fix"),
            ({"norm_topk_prob": "yes"}, "`norm_topk_prob` is 'yes'.*Fix"),
        ],
        settings={"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
        cases=CASES,
        exported={"mlp_only_layers": [1]},
    )

    def test_the_default_of_renormalising_is_that_of_transformers(self) -> None:
        config = {key: value for key, value in self.facts.tiny().items() if key != "norm_topk_prob"}
        _, block = list(build(config).blocks(8))[-1]
        assert isinstance(block, SparseBlock)
        assert block.renormalise == Qwen3MoeConfig(**config).norm_topk_prob

    def test_the_number_of_experts_is_read_where_each_version_writes_it(self) -> None:
        config = self.facts.tiny()
        tensors = self.facts.tensors(config)
        config["num_local_experts"] = config.pop("num_experts")
        assert self.facts.tensors(config) == tensors
        assert self.facts.tensors(Qwen3MoeConfig(**self.facts.tiny()).to_dict()) == tensors


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The preset ``tiny`` with four layers, each with experts unless `changes` say otherwise."""
    return TestQwen3Moe.facts.tiny(**{"num_hidden_layers": 4, "mlp_only_layers": [], **changes})


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": None}, []),
        ({"mlp_only_layers": [0, 3]}, [0, 3]),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 1, 2]),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], dense: list[int]) -> None:
    blocks = [block for _, block in build(tiny_config(**changes)).blocks(8)]
    assert [i for i, block in enumerate(blocks) if isinstance(block, PlainBlock)] == dense
    assert all(isinstance(block, PlainBlock | SparseBlock) for block in blocks)


def test_the_size_of_a_dense_layer_is_read_where_there_is_one() -> None:
    config = tiny_config()
    del config["intermediate_size"]
    build(config)
    with pytest.raises(UserError, match=r"key `intermediate_size` is missing\. Fix"):
        build({**config, "mlp_only_layers": [0]})
