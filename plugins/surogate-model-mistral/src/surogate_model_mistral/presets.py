"""Published Mistral shapes (the config.json files of mistralai/Mistral-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    {
        "7b-v0.1": (4096, 32, 32, 8, 14336, {"vocab_size": 32000, "rope_theta": 10_000.0, "sliding_window": 4096}),
        "7b-v0.3": (4096, 32, 32, 8, 14336, {"vocab_size": 32768}),
        "nemo-12b": (5120, 40, 32, 8, 14336, {"max_position_embeddings": 131072}),
        "small-24b": (5120, 40, 32, 8, 32768, {"rope_theta": 100_000_000.0}),
        "ministral-8b": (4096, 36, 32, 8, 12288, {"rope_theta": 100_000_000.0, "sliding_window": 32768}),
    },
    tiny={"head_dim": 32, "sliding_window": 64},
)
