"""Published Qwen2.5 shapes (the config.json files of Qwen/Qwen2.5-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

SMALL = {"vocab_size": 151936, "tie_word_embeddings": True}
LARGE = {"rms_norm_eps": 1e-5}

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    {
        "0.5b": (896, 24, 14, 2, 4864, {**SMALL, "max_position_embeddings": 32768}),
        "1.5b": (1536, 28, 12, 2, 8960, SMALL),
        "3b": (2048, 36, 16, 2, 11008, {**SMALL, "max_position_embeddings": 32768}),
        "7b": (3584, 28, 28, 4, 18944, {}),
        "14b": (5120, 48, 40, 8, 13824, LARGE),
        "32b": (5120, 64, 40, 8, 27648, LARGE),
        "72b": (8192, 80, 64, 8, 29568, LARGE),
    },
    tiny={},
)
