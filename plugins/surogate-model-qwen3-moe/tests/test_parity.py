"""Against transformers on a tiny random Qwen3-MoE with dense and sparse layers: logits, every gradient, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from surogate_model_qwen3_moe.model import build
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from surogate_testing.parity import TINY, TOLERANCE, Pair, Record

CASES: dict[str, dict[str, Any]] = {
    "dense and sparse layers": {"mlp_only_layers": [1], "norm_topk_prob": True},
    "probabilities as they are": {"decoder_sparse_step": 2},
    "tied, with biases": {"tie_word_embeddings": True, "attention_bias": True},
    "every expert": {"num_experts": 5, "num_experts_per_tok": 5, "norm_topk_prob": True},
    "one expert a token": {"num_experts_per_tok": 1},
}


def pair(**changes: Any) -> Pair:
    settings = {
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "architectures": ["Qwen3MoeForCausalLM"],
    }
    return Pair.of(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**TINY, **settings, **changes}), build)


@pytest.mark.slow_cases("every expert", "tied, with biases")
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits(changes: dict[str, Any], record_testsuite_property: Record) -> None:
    error = pair(**changes).logits_error()
    record_testsuite_property(f"logits, {changes}", f"{error:.2e}")
    assert error <= TOLERANCE


@pytest.mark.slow_cases(*(f"{name}-{how}" for name in list(CASES)[2:] for how in ("kept", "recomputed")))
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_loss_and_every_gradient(changes: dict[str, Any], recompute: bool, record_testsuite_property: Record) -> None:
    error, name = pair(**changes).gradient_error(recompute=recompute)
    record_testsuite_property(f"gradient, {changes}, {recompute=}", f"{error:.2e} {name}")
    assert error <= TOLERANCE, name


def test_the_exported_model(tmp_path: Path) -> None:
    assert pair(mlp_only_layers=[1]).full_export_error(tmp_path / "model") <= TOLERANCE
