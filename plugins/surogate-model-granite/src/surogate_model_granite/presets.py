"""Published Granite shapes (the config.json files of ibm-granite/granite-3.3-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "embedding_multiplier": 12.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49159,
    },
    {
        "3.3-2b": (2048, 40, 32, 8, 8192, {"attention_multiplier": 0.015625, "logits_scaling": 8.0}),
        "3.3-8b": (4096, 40, 32, 8, 12800, {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}),
    },
    tiny={"attention_multiplier": 0.03125, "logits_scaling": 8.0, "pad_token_id": None},
)
