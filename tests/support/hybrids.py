"""Small models of the shipped hybrids, for runs and for engines: layers of each kind, and slow decays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import surogate_model_nemotron_h
import surogate_model_qwen3_5
import torch
from torch import Tensor

from surogate_core.dsl.tensors import TensorSpec as TensorSpec
from surogate_core.hf.card import CardFacts
from surogate_core.hf.export import export_full
from surogate_testing import tiny
from surogate_testing.chat_templates import byte_tokenizer

SIZES = ("model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.vocab_size=1024")
DENSE_NEMOTRON = ("model=nemotron-h", *SIZES, "model.config.hybrid_override_pattern='M-*M'")
EXPERTS = (
    *("model=qwen3-5-35b-a3b", *SIZES, "model.config.num_hidden_layers=4", "model.config.head_dim=32"),
    *("model.config.num_attention_heads=4", "model.config.linear_num_key_heads=2", "model.config.num_experts=4"),
    *("model.config.linear_num_value_heads=4", "model.config.linear_key_head_dim=32", "model.config.eos_token_id=null"),
    *("model.config.linear_value_head_dim=32", "model.config.num_experts_per_tok=2"),
    *("model.config.moe_intermediate_size=32", "model.config.shared_expert_intermediate_size=32"),
)
RUNS: Mapping[str, tuple[str, ...]] = {
    "nemotron-h": ("model=nemotron-h", *SIZES),
    "qwen3-5": ("model=qwen3-5", *SIZES),
    "qwen3-5 with experts": EXPERTS,
}
"""Family → overrides of a run from random weights; Nemotron-H has experts too."""
DENSE: Mapping[str, tuple[str, ...]] = {
    "nemotron-h": (*DENSE_NEMOTRON, "model.config.num_hidden_layers=4"),
    "qwen3-5": RUNS["qwen3-5"],
}
"""The same without experts."""

_EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
_QWEN = {
    **surogate_model_qwen3_5.surogate_model_family().presets["tiny"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 61,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 8,
}
_NEMOTRON = {
    **surogate_model_nemotron_h.surogate_model_family().presets["tiny"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 61,
    "mamba_head_dim": 8,
    "hybrid_override_pattern": "M-*M",
    "num_hidden_layers": 4,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "nemotron-h": _NEMOTRON,
    "nemotron-h with experts": {**_NEMOTRON, "hybrid_override_pattern": "ME*M"},
    "qwen3-5": _QWEN,
    "qwen3-5 with experts": {**_QWEN, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
    "qwen3-next": {**_QWEN, **_EXPERTS, "model_type": "qwen3_next", "mlp_only_layers": [0, 1, 2]},
}
"""Name → configuration of a model for an engine."""


def build(config: Mapping[str, Any]) -> Any:
    """The model of a configuration of `CONFIGS`."""
    plugin = surogate_model_nemotron_h if config["model_type"] == "nemotron_h" else surogate_model_qwen3_5
    return plugin.surogate_model_family().build(config)


def slow() -> Callable[[TensorSpec], Tensor]:
    """Random values, with decays so slow that a state is felt for dozens of tokens."""
    drawn = tiny.random_source()

    def source(spec: TensorSpec) -> Tensor:
        value = drawn(spec)
        assert isinstance(value, Tensor)
        return torch.linspace(-4.5, -3, value.numel()) if spec.hf_name.endswith("A_log") else value

    return source


def engine(name: str, **changes: Any) -> Any:
    """An engine of a model of `CONFIGS`."""
    return tiny.engine(CONFIGS[name], build=build, source=slow(), **changes)


def save(name: str, directory: Path) -> Path:
    """A model of `CONFIGS` as a directory with a tokenizer, whose vocabulary it has."""
    tokenizer = byte_tokenizer()
    config = {**CONFIGS[name], "vocab_size": -(-len(tokenizer) // 64) * 64}
    made = tiny.engine(config, build=build, source=slow())
    tensors, fused = made.parameters.base_tensors(), made.model.fused_tensors()
    card = CardFacts(title=name)
    return export_full(directory, tensors, config=config, tokenizer=tokenizer, card=card, fused=fused)
