"""Published GLM-4 shapes (the config.json files of zai-org/GLM-4-*-0414), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
    },
    {
        "9b": (4096, 40, 32, 2, 13696, {}),
    },
    tiny={"head_dim": 32, "pad_token_id": None},
)
