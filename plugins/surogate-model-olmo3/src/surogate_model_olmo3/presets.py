"""Published OLMo 2 and 3 shapes (the config.json files of allenai/OLMo-2-* and Olmo-3-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

SHARED = {
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 100257,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "sliding_window": None,
    "vocab_size": 100352,
}

PRESETS = bundles.decoder_presets(
    {
        **SHARED,
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "max_position_embeddings": 65536,
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
        "2-1b": (2048, 16, 16, 16, 8192, OLMO2),
        "2-7b": (4096, 32, 32, 32, 11008, OLMO2),
        "2-13b": (5120, 40, 40, 40, 13824, OLMO2),
        "2-32b": (5120, 64, 40, 8, 27648, OLMO2),
    },
    tiny={"pad_token_id": None, "rope_theta": 500_000.0, "sliding_window": 64},
)
