"""Published Ministral 3 shapes (the config.json files of mistralai/Ministral-3-*), and one for a CPU."""

from __future__ import annotations

from typing import Any

from surogate_core.plugin import bundles


def _stretched(theta: float, original: int) -> dict[str, Any]:
    """YaRN and the growing scale of queries, from a number of positions to sixteen times as many."""
    return {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": original,
        "rope_theta": theta,
        "rope_type": "yarn",
        "type": "yarn",
    }


PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 11,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    {
        "3b": (3072, 26, 32, 8, 9216, {"rope_parameters": _stretched(1e6, 16384), "tie_word_embeddings": True}),
        "8b": (4096, 34, 32, 8, 14336, {"rope_parameters": _stretched(1e6, 16384)}),
        # Pruned from Mistral Small 3.1, whose base it keeps.
        "14b": (5120, 40, 32, 8, 16384, {"rope_parameters": _stretched(1e9, 16384)}),
    },
    tiny={"head_dim": 32, "pad_token_id": None, "rope_parameters": _stretched(1e4, 16)},
)
