"""Published Llama 3 shapes (the config.json files of meta-llama/Llama-3.*), and one for a CPU."""

from __future__ import annotations

from typing import Any

from surogate_core.plugin import bundles


def _stretched(factor: float) -> dict[str, Any]:
    """RoPE scaling from 8192 positions to 131072."""
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {"rope_scaling": scaling}


PRESETS = bundles.decoder_presets(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    {
        "3.2-1b": (2048, 16, 32, 8, 8192, {**_stretched(32.0), "head_dim": 64, "tie_word_embeddings": True}),
        "3.2-3b": (3072, 28, 24, 8, 8192, {**_stretched(32.0), "tie_word_embeddings": True}),
        "3.1-8b": (4096, 32, 32, 8, 14336, _stretched(8.0)),
        "3.1-70b": (8192, 80, 64, 8, 28672, _stretched(8.0)),
    },
    tiny={"head_dim": 32},
)
