"""Adapters of experts, written by an engine, in PEFT: the same logits, in models with and without dense layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from surogate_model_qwen3_moe.model import build
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from surogate_testing import tiny
from surogate_testing.parity import TINY, TOLERANCE, ModelPair


def pair(**changes: Any) -> ModelPair:
    settings = {
        **TINY,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 24,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "norm_topk_prob": True,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    return ModelPair.of(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**settings, **changes}), build)


@pytest.mark.slow_cases("sparse-experts", "mixed-attention", "sparse-attention", "mixed-down", "sparse-down")
@pytest.mark.slow_cases("attention", "down")
@pytest.mark.parametrize(
    "targets",
    [tiny.TARGETS, ("q_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj"), ("down_proj",)],
    ids=["all", "attention", "experts", "down"],
)
@pytest.mark.parametrize("dense", [[], [0]], ids=["sparse", "mixed"])
def test_the_exported_adapter(tmp_path: Path, dense: list[int], targets: tuple[str, ...]) -> None:
    error = pair(mlp_only_layers=dense).own_adapter_error(tmp_path / "adapter", targets)
    assert error <= TOLERANCE
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(targets)


@pytest.mark.parametrize("dense", [[], [0]], ids=["sparse", "mixed"])
def test_experts_with_a_rank_of_their_own_and_trained_routers(tmp_path: Path, dense: list[int]) -> None:
    error = pair(mlp_only_layers=dense).own_adapter_error(tmp_path / "adapter", expert_rank=2, train_router=True)
    assert error <= TOLERANCE
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (2, 4, ["mlp.gate"])
    assert config["rank_pattern"]["q_proj"] == 4
    assert config["alpha_pattern"]["q_proj"] == 8


def test_adapters_beside_experts_that_have_none(tmp_path: Path) -> None:
    """PEFT takes `gate_proj` as the experts' in a model that has any."""
    error = pair(mlp_only_layers=[0]).own_adapter_error(tmp_path / "adapter", ("attention", "mlp"), train_router=True)
    assert error <= TOLERANCE
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert "model.layers.0.mlp.gate_proj.weight" in config["target_parameters"]
