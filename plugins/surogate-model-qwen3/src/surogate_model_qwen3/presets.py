"""Published Qwen3 shapes (the config.json files of Qwen/Qwen3-*), and one for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _config(**keys: Any) -> Mapping[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
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
    "0.6b": _config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "1.7b": _config(
        hidden_size=2048,
        num_hidden_layers=28,
        num_attention_heads=16,
        intermediate_size=6144,
        tie_word_embeddings=True,
    ),
    "4b": _config(
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        intermediate_size=9728,
        tie_word_embeddings=True,
    ),
    "8b": _config(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288),
    "14b": _config(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=17408),
    "32b": _config(hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600),
}
