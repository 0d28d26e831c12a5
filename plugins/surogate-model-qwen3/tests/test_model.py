"""Presets have the published sizes; a config.json that cannot be computed is refused by key."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch
import yaml
from surogate_model_qwen3.model import build
from surogate_model_qwen3.presets import PRESETS
from transformers import Qwen3Config, Qwen3ForCausalLM

from surogate_core.engine.pieces import distinct, pieces
from surogate_core.errors import UserError

PUBLISHED = {
    "0.6b": 596_049_920,
    "1.7b": 1_720_574_976,
    "4b": 4_022_468_096,
    "8b": 8_190_735_360,
    "14b": 14_768_307_200,
    "32b": 32_762_123_264,
}
"""Parameters of Qwen/Qwen3-*, a tied matrix counted once."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` mapping of a two-layer Qwen3 with grouped queries."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "use_sliding_window": False,
        "hidden_act": "silu",
        **changes,
    }


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {s.hf_name: s.shape for s in distinct(pieces(build(config), lora=None, max_seqlen=8))}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_tensors_of_transformers(name: str) -> None:
    ours = shapes(dict(PRESETS[name]))
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**PRESETS[name]))
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert ours == theirs
    if name in PUBLISHED:
        assert sum(map(math.prod, ours.values())) == PUBLISHED[name]


def test_every_preset_has_a_published_size_or_is_tiny() -> None:
    assert {*PUBLISHED, "tiny"} == {*PRESETS}


def test_presets_are_json() -> None:
    assert json.loads(json.dumps({**PRESETS})) == {k: dict(v) for k, v in PRESETS.items()}


def test_every_option_names_a_preset_and_every_preset_has_one() -> None:
    named = set()
    for file in resources.files("surogate_model_qwen3.conf.model").iterdir():
        if file.name.endswith(".yaml"):
            option = yaml.safe_load(file.read_text(encoding="utf-8"))
            assert option["model"]["name"] == "qwen3"
            named.add(option["model"]["preset"])
    assert named == set(PRESETS)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "num_hidden_layers",
    ],
)
def test_a_missing_size_is_named(key: str) -> None:
    config = tiny_config()
    del config[key]
    with pytest.raises(UserError, match=rf"config\.json: key `{key}` is missing\. Fix"):
        build(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "`rope_scaling`: RoPE scaling `longrope`.*Fix"),
        ({"rope_scaling": {"type": "yarn"}}, "`rope_scaling`: RoPE scaling `yarn` needs `factor`.*Fix"),
        ({"use_sliding_window": True}, "`use_sliding_window`.*Fix"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "`layer_types`.*Fix"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'.*Fix"),
        ({"attention_dropout": 0.1}, "`attention_dropout`.*Fix"),
        ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads` \(3\)"),
        ({"head_dim": 15}, "`head_dim` must be even"),
        ({"hidden_size": "big"}, "`hidden_size` must be a positive integer, not 'big'"),
        ({"hidden_size": 0}, "`hidden_size` must be a positive integer, not 0"),
        ({"intermediate_size": True}, "`intermediate_size` must be a positive integer, not True"),
    ],
)
def test_what_the_block_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(tiny_config(**changes))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e3},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e3}},
    ],
    ids=["transformers 4", "transformers 5", "nulls"],
)
def test_rope_theta_is_read_where_each_version_writes_it(rope: dict[str, Any]) -> None:
    config = tiny_config()
    del config["rope_theta"]
    positions = torch.arange(4, dtype=torch.int32)
    tables = build({**config, **rope}).tables(positions, torch.float32)
    angles = torch.arange(4.0)[:, None] / 5e3 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(tables["cos"], angles.cos())
    torch.testing.assert_close(tables["sin"], angles.sin())


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    """A config.json need not write what equals the family's default."""
    config = tiny_config()
    for key in ("head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "attention_bias", "hidden_act"):
        del config[key]
    theirs = Qwen3Config(**config)
    model = build(config)
    ours = shapes(config)
    assert ours["model.layers.0.self_attn.q_norm.weight"] == (theirs.head_dim,)
    assert model.tied == theirs.tie_word_embeddings
    assert ("model.layers.0.self_attn.q_proj.bias" in ours) == theirs.attention_bias
    assert model.head.eps.value(config) == theirs.rms_norm_eps
    positions = torch.tensor([1], dtype=torch.int32)
    exponents = torch.arange(0, theirs.head_dim, 2) / theirs.head_dim
    expected = (1 / theirs.rope_parameters["rope_theta"] ** exponents).cos()
    torch.testing.assert_close(model.tables(positions, torch.float32)["cos"][0], expected)
