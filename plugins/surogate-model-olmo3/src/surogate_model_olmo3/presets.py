"""Published OLMo 3 shapes (the config.json files of allenai/Olmo-3-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 100257,
        "pad_token_id": 100277,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "vocab_size": 100278,
    },
    {
        "7b": (4096, 32, 32, 32, 11008, {}),
        "32b": (5120, 64, 40, 8, 27648, {}),
    },
    tiny={"pad_token_id": None, "rope_theta": 500_000.0, "sliding_window": 64},
)
