"""`rope_scaling` and `max_model_len`: what is trained is what transformers reads from the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from surogate_core.config.resolve import load_run_config
from surogate_core.dsl.rope import Rope
from surogate_core.errors import UserError
from surogate_core.plugins.registry import Registry
from surogate_core.train.setup import resolve_model

Changes = Callable[..., dict[str, Any]]


@pytest.fixture
def values(hf_dir: Path, installed: Registry) -> Changes:
    """The config.json that a run on `hf_dir` trains."""

    def read(*overrides: str) -> dict[str, Any]:
        config = load_run_config([f"model={hf_dir}", *overrides], registry=installed)
        return dict(resolve_model(config, installed).model.config)

    return read


def test_nothing_changes_by_default(values: Changes, hf_dir: Path) -> None:
    assert values() == json.loads((hf_dir / "config.json").read_text())


def test_the_keys_reach_the_model(values: Changes) -> None:
    by_name = values("rope_scaling=yarn", "max_model_len=1024", "sequence_len=512")
    assert by_name["max_position_embeddings"] == 1024
    rope = Rope(by_name, 16)
    assert (rope.kind, rope.parameters["factor"], rope.parameters["original_max_position_embeddings"]) == (
        "yarn",
        4,
        256,
    )
    as_mapping = values("rope_scaling={type: linear, factor: 2.0}", "sequence_len=64")
    assert (Rope(as_mapping, 16).kind, as_mapping["max_position_embeddings"]) == ("linear", 256)
    assert values("max_model_len=128", "sequence_len=64")["max_position_embeddings"] == 128
    with pytest.raises(UserError, match=r"rope_scaling: linear.*max_model_len above the model's 256"):
        values("rope_scaling=linear", "sequence_len=64")
    with pytest.raises(UserError, match="RoPE scaling `longrope` is not available"):
        values("rope_scaling={type: longrope, factor: 2.0}", "sequence_len=64")


def test_an_exported_model_has_the_scaling(
    tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: Callable[..., int]
) -> None:
    scaling = ("rope_scaling=yarn", "max_model_len=1024")
    run_here(tmp_path / "out", *base_on(hf_dir), "lora=false", "max_steps=1", *scaling)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert loaded.config.rope_parameters["rope_type"] == "yarn"
    assert loaded.config.max_position_embeddings == 1024
    rope = Rope(json.loads((tmp_path / "out" / "model" / "config.json").read_text()), 16)
    rotary = loaded.model.rotary_emb
    assert torch.equal(rotary.inv_freq, rope.frequencies())
    assert rotary.attention_scaling == rope.amplitude != 1.0
