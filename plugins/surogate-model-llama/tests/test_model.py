"""Presets have the published sizes; a config.json that cannot be computed is refused by key."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch
import yaml
from surogate_model_llama.model import build
from surogate_model_llama.presets import PRESETS
from transformers import LlamaConfig, LlamaForCausalLM

from surogate_core.engine.pieces import distinct, pieces
from surogate_core.errors import UserError

PUBLISHED = {
    "3.2-1b": 1_235_814_400,
    "3.2-3b": 3_212_749_824,
    "3.1-8b": 8_030_261_248,
    "3.1-70b": 70_553_706_496,
}
"""Parameters of meta-llama/Llama-3.*, a tied matrix counted once."""


KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "rope_theta",
    "tie_word_embeddings",
)
SHAPES = {
    "3.2-1b": (2048, 16, 32, 8, 8192, 128256, 5e5, True),
    "3.2-3b": (3072, 28, 24, 8, 8192, 128256, 5e5, True),
    "3.1-8b": (4096, 32, 32, 8, 14336, 128256, 5e5, False),
    "3.1-70b": (8192, 80, 64, 8, 28672, 128256, 5e5, False),
}
"""From the config.json files of meta-llama/Llama-3.*."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {**PRESETS["tiny"], **changes}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {s.hf_name: s.shape for s in distinct(pieces(build(config), lora=None, max_seqlen=8))}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_tensors_of_transformers(name: str) -> None:
    ours = shapes(dict(PRESETS[name]))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**json.loads(json.dumps(PRESETS[name]))))
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert ours == theirs
    if name in PUBLISHED:
        assert sum(map(math.prod, ours.values())) == PUBLISHED[name]


def test_every_preset_has_a_published_size_or_is_tiny() -> None:
    assert {*PUBLISHED, "tiny"} == {*PRESETS}


@pytest.mark.parametrize("name", SHAPES)
def test_a_preset_has_the_published_shape(name: str) -> None:
    """What the number of parameters does not tell: how the features are split into heads, and the positions' base."""
    assert tuple(PRESETS[name][key] for key in KEYS) == SHAPES[name]


def test_presets_are_json() -> None:
    assert json.loads(json.dumps({**PRESETS})) == {k: dict(v) for k, v in PRESETS.items()}


def test_every_option_names_a_preset_and_every_preset_has_one() -> None:
    named = set()
    for file in resources.files("surogate_model_llama.conf.model").iterdir():
        if file.name.endswith(".yaml"):
            option = yaml.safe_load(file.read_text(encoding="utf-8"))
            assert option["model"]["name"] == "llama"
            named.add(option["model"]["preset"])
    assert named == set(PRESETS)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers"]
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
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "`llama3` needs `low_freq_factor`.*Fix"),
        ({"use_sliding_window": True, "max_window_layers": 99}, "`use_sliding_window`.*Fix"),
        ({"layer_types": ["sliding_attention"] * 4}, "`layer_types`.*Fix"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu'.*Fix"),
        ({"attention_dropout": 0.1}, "`attention_dropout`.*Fix"),
        ({"num_key_value_heads": 3}, r"`num_attention_heads` \(4\) must be a multiple of `num_key_value_heads` \(3\)"),
        ({"head_dim": 15}, "`head_dim` must be even"),
        ({"head_dim": None, "hidden_size": 129}, r"`hidden_size` \(129\) must be a multiple of"),
        ({"hidden_size": "big"}, "`hidden_size` must be a positive integer, not 'big'"),
        ({"intermediate_size": True}, "`intermediate_size` must be a positive integer, not True"),
    ],
)
def test_what_the_block_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(tiny_config(**changes))


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    """A config.json need not write what equals the family's default."""
    config = tiny_config()
    for key in (
        "head_dim",
        "num_key_value_heads",
        "rope_theta",
        "rope_scaling",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
    ):
        config.pop(key, None)
    theirs = LlamaConfig(**config)
    with torch.device("meta"):
        expected = {n: tuple(p.shape) for n, p in LlamaForCausalLM(theirs).named_parameters()}
    model = build(config)
    assert shapes(config) == expected
    assert model.tied == theirs.tie_word_embeddings
    assert model.head.eps.value(config) == theirs.rms_norm_eps
    exponents = torch.arange(0, 32, 2) / 32
    angles = 1 / theirs.rope_parameters["rope_theta"] ** exponents
    tables = model.tables(torch.tensor([0, 1], dtype=torch.int32), torch.float32)
    torch.testing.assert_close(tables["cos"][1], angles.cos())
