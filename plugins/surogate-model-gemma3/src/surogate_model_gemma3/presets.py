"""Published Gemma 3 shapes (the text configurations of google/gemma-3-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

LONG = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 262_208, "sliding_window": 1024}
SHORT = {"max_position_embeddings": 32_768, "sliding_window": 512}

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262_144,
    },
    {
        "270m": (640, 18, 4, 1, 2048, SHORT),
        "1b": (1152, 26, 4, 1, 6912, SHORT),
        "4b": (2560, 34, 8, 4, 10_240, LONG),
        "12b": (3840, 48, 16, 8, 15_360, LONG),
        "27b": (5376, 62, 32, 16, 21_504, {**LONG, "head_dim": 128, "query_pre_attn_scalar": 168}),
    },
    tiny={
        "head_dim": 32,
        "pad_token_id": None,
        "query_pre_attn_scalar": 32,
        "rope_theta": 1_000_000.0,
        "sliding_window": 64,
        "sliding_window_pattern": 2,
    },
)
