"""Published Qwen3 shapes (the config.json files of Qwen/Qwen3-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

TIED = {"tie_word_embeddings": True}

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    {
        "0.6b": (1024, 28, 16, 8, 3072, TIED),
        "1.7b": (2048, 28, 16, 8, 6144, TIED),
        "4b": (2560, 36, 32, 8, 9728, TIED),
        "8b": (4096, 36, 32, 8, 12288, {}),
        "14b": (5120, 40, 40, 8, 17408, {}),
        "32b": (5120, 64, 64, 8, 25600, {}),
    },
    tiny={"head_dim": 32},
)
