"""Published Llama 3 shapes (the config.json files of meta-llama/Llama-3.*), and one for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _config(*, factor: float | None = None, **keys: Any) -> Mapping[str, Any]:
    """`factor`: of the llama3 RoPE scaling from 8192 positions to 131072."""
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": scaling if factor else None,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
        **keys,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        vocab_size=1024,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "3.2-1b": _config(
        factor=32.0,
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        intermediate_size=8192,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "3.2-3b": _config(
        factor=32.0,
        hidden_size=3072,
        num_hidden_layers=28,
        num_attention_heads=24,
        intermediate_size=8192,
        tie_word_embeddings=True,
    ),
    "3.1-8b": _config(
        factor=8.0,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        intermediate_size=14336,
    ),
    "3.1-70b": _config(
        factor=8.0,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        intermediate_size=28672,
    ),
}
