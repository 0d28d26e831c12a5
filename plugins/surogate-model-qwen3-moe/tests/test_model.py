"""Presets have the published sizes; a config.json that cannot be computed is refused by key."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch
import yaml
from surogate_model_qwen3_moe.model import PlainBlock, SparseBlock, build
from surogate_model_qwen3_moe.presets import PRESETS
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from surogate_core.engine.pieces import distinct, pieces
from surogate_core.errors import UserError

PUBLISHED = {"30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560}
"""Parameters of Qwen/Qwen3-30B-A3B and -235B-A22B."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` mapping of a four-layer Qwen3-MoE with grouped queries."""
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 256,
        **changes,
    }


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {s.hf_name: s.shape for s in distinct(pieces(build(config), lora=None, max_seqlen=8))}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_tensors_of_transformers(name: str) -> None:
    model, ours = build(PRESETS[name]), shapes(dict(PRESETS[name]))
    fused = model.fused_tensors()
    assert all(name not in ours for name in fused)
    ours_in_files = {n for n in ours if ".experts." not in n} | set(fused)
    with torch.device("meta"):
        theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**PRESETS[name]))
    wanted = {n: tuple(p.shape) for n, p in theirs.named_parameters()}
    assert ours_in_files == wanted.keys()
    assert all(wanted[n] == (fused[n].shape if n in fused else ours[n]) for n in wanted)
    if name in PUBLISHED:
        assert sum(map(math.prod, ours.values())) == PUBLISHED[name]


def test_every_preset_has_a_published_size_or_is_tiny() -> None:
    assert {*PUBLISHED, "tiny"} == {*PRESETS}


def test_presets_are_json() -> None:
    assert json.loads(json.dumps({**PRESETS})) == {k: dict(v) for k, v in PRESETS.items()}


def test_every_option_names_a_preset_and_every_preset_has_one() -> None:
    named = set()
    for file in resources.files("surogate_model_qwen3_moe.conf.model").iterdir():
        if file.name.endswith(".yaml"):
            option = yaml.safe_load(file.read_text(encoding="utf-8"))
            assert option["model"]["name"] == "qwen3-moe"
            named.add(option["model"]["preset"])
    assert named == set(PRESETS)


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


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"]
)
def test_a_missing_size_is_named(key: str) -> None:
    config = tiny_config()
    del config[key]
    with pytest.raises(UserError, match=rf"config\.json: key `{key}` is missing\. Fix"):
        build(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "`use_sliding_window`.*Fix"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'.*Fix"),
        ({"attention_dropout": 0.1}, "`attention_dropout`.*Fix"),
        ({"num_experts_per_tok": 7}, r"`num_experts_per_tok` \(7\) is larger than `num_experts` \(6\)\. Fix"),
        ({"num_experts": 0}, "`num_experts` must be a positive integer, not 0"),
        ({"num_experts_per_tok": 0}, "`num_experts_per_tok` must be a positive integer, not 0"),
        ({"decoder_sparse_step": 0}, "`decoder_sparse_step` must be a positive integer, not 0"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts.*`mlp_only_layers`.*Fix"),
        ({"decoder_sparse_step": 5}, "no layer has experts.*`decoder_sparse_step`.*Fix"),
        ({"mlp_only_layers": [4]}, r"`mlp_only_layers` is \[4\]; it lists layers from 0 to 3\. Fix"),
        ({"mlp_only_layers": "0"}, "`mlp_only_layers` is '0'.*Fix"),
        ({"norm_topk_prob": "yes"}, "`norm_topk_prob` is 'yes'.*Fix"),
    ],
)
def test_what_is_not_computed_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(tiny_config(**changes))


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    """A config.json need not write what equals the family's default."""
    config = tiny_config()
    for key in ("rope_theta", "rms_norm_eps"):
        del config[key]
    theirs = Qwen3MoeConfig(**config)
    model = build(config)
    _, block = next(model.blocks(8))
    assert isinstance(block, SparseBlock)
    assert block.renormalise == theirs.norm_topk_prob
    assert block.eps == theirs.rms_norm_eps
    assert block.head_dim == 8
    assert model.tied == theirs.tie_word_embeddings
    positions = torch.tensor([1], dtype=torch.int32)
    expected = (1 / theirs.rope_parameters["rope_theta"] ** (torch.arange(0, 8, 2) / 8)).cos()
    torch.testing.assert_close(model.tables(positions, torch.float32)["cos"][0], expected)


def test_the_number_of_experts_is_read_where_each_version_writes_it() -> None:
    config = tiny_config()
    config["num_local_experts"] = config.pop("num_experts")
    assert shapes(config) == shapes(tiny_config())
    assert shapes(Qwen3MoeConfig(**tiny_config()).to_dict()) == shapes(tiny_config())
