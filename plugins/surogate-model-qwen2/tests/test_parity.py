"""Against transformers and PEFT on a tiny random Qwen2: logits, every gradient, RoPE past its length, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from surogate_model_qwen2.model import build
from transformers import Qwen2Config, Qwen2ForCausalLM

from surogate_testing.parity import TINY, TOLERANCE, Pair, Record

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "no grouped queries": {"num_key_value_heads": 4},
}

LONG = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}
"""RoPE scaling whose original length the documents exceed."""


def pair(lengths: tuple[int, ...] = (13, 9, 7), **changes: Any) -> Pair:
    config = Qwen2Config(**{**TINY, "architectures": ["Qwen2ForCausalLM"], **changes})
    return Pair.of(Qwen2ForCausalLM, config, build, lengths=lengths)


def long_pair(scaling: dict[str, Any]) -> Pair:
    rope = {"rope_theta": 5000.0, **scaling}
    return pair((90, 21), rope_parameters=rope, max_position_embeddings=64 if "dynamic" in rope.values() else 128)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_logits(changes: dict[str, Any], record_testsuite_property: Record) -> None:
    error = pair(**changes).logits_error()
    record_testsuite_property(f"logits, {changes}", f"{error:.2e}")
    assert error <= TOLERANCE


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_loss_and_every_gradient(changes: dict[str, Any], recompute: bool, record_testsuite_property: Record) -> None:
    error, name = pair(**changes).gradient_error(recompute=recompute)
    record_testsuite_property(f"gradient, {changes}, {recompute=}", f"{error:.2e} {name}")
    assert error <= TOLERANCE, name


@pytest.mark.slow_cases("linear", "dynamic")
@pytest.mark.parametrize("scaling", LONG.values(), ids=LONG)
def test_rope_past_its_original_length(scaling: dict[str, Any], record_testsuite_property: Record) -> None:
    logits = long_pair(scaling).logits_error()
    gradient, name = long_pair(scaling).gradient_error(recompute=True)
    record_testsuite_property(f"{scaling['rope_type']}", f"logits {logits:.2e}, gradient {gradient:.2e} {name}")
    assert max(logits, gradient) <= TOLERANCE
    scaled, plain = long_pair(scaling), pair((90, 21))
    plain.reference.load_state_dict(scaled.reference.state_dict())
    mixed = Pair(
        reference=plain.reference, build=lambda _: build(scaled.reference.config.to_dict()), documents=plain.documents
    )
    assert mixed.logits_error() > 100 * TOLERANCE, "the scaling must matter"


def test_the_exported_model(tmp_path: Path) -> None:
    assert pair().full_export_error(tmp_path / "model") <= TOLERANCE


def test_the_exported_adapter(tmp_path: Path) -> None:
    assert pair(tie_word_embeddings=True).adapter_export_error(tmp_path / "adapter") <= TOLERANCE
