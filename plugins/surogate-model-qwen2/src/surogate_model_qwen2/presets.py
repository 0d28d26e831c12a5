"""Published Qwen2.5 shapes (the config.json files of Qwen/Qwen2.5-*), and one for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _config(**keys: Any) -> Mapping[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
        **keys,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _config(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=1024,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "0.5b": _config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        max_position_embeddings=32768,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "1.5b": _config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "3b": _config(
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        intermediate_size=11008,
        max_position_embeddings=32768,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "7b": _config(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
    ),
    "14b": _config(
        hidden_size=5120,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=13824,
        rms_norm_eps=1e-5,
    ),
    "32b": _config(
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        intermediate_size=27648,
        rms_norm_eps=1e-5,
    ),
    "72b": _config(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=29568,
        rms_norm_eps=1e-5,
    ),
}
