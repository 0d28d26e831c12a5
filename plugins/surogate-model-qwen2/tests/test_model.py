"""Presets have the published sizes; a config.json that cannot be computed is refused by key."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch
import yaml
from surogate_model_qwen2.model import build
from surogate_model_qwen2.presets import PRESETS
from transformers import Qwen2Config, Qwen2ForCausalLM

from surogate_core.engine.pieces import distinct, pieces
from surogate_core.errors import UserError

PUBLISHED = {
    "0.5b": 494_032_768,
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
    "14b": 14_770_033_664,
    "32b": 32_763_876_352,
    "72b": 72_706_203_648,
}
"""Parameters of Qwen/Qwen2.5-*, a tied matrix counted once."""


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
    "0.5b": (896, 24, 14, 2, 4864, 151936, 1e6, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, 1e6, True),
    "3b": (2048, 36, 16, 2, 11008, 151936, 1e6, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, 1e6, False),
    "14b": (5120, 48, 40, 8, 13824, 152064, 1e6, False),
    "32b": (5120, 64, 40, 8, 27648, 152064, 1e6, False),
    "72b": (8192, 80, 64, 8, 29568, 152064, 1e6, False),
}
"""From the config.json files of Qwen/Qwen2.5-*."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    return {**PRESETS["tiny"], **changes}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {s.hf_name: s.shape for s in distinct(pieces(build(config), lora=None, max_seqlen=8))}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_tensors_of_transformers(name: str) -> None:
    ours = shapes(dict(PRESETS[name]))
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**json.loads(json.dumps(PRESETS[name]))))
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
    for file in resources.files("surogate_model_qwen2.conf.model").iterdir():
        if file.name.endswith(".yaml"):
            option = yaml.safe_load(file.read_text(encoding="utf-8"))
            assert option["model"]["name"] == "qwen2"
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
        "rope_theta",
        "rms_norm_eps",
        "tie_word_embeddings",
        "hidden_act",
    ):
        config.pop(key, None)
    theirs = Qwen2Config(**config)
    with torch.device("meta"):
        expected = {n: tuple(p.shape) for n, p in Qwen2ForCausalLM(theirs).named_parameters()}
    model = build(config)
    assert shapes(config) == expected
    assert model.tied == theirs.tie_word_embeddings
    assert model.head.eps.value(config) == theirs.rms_norm_eps
    exponents = torch.arange(0, 32, 2) / 32
    angles = 1 / theirs.rope_parameters["rope_theta"] ** exponents
    tables = model.tables(torch.tensor([0, 1], dtype=torch.int32), torch.float32)
    torch.testing.assert_close(tables["cos"][1], angles.cos())
