"""Published gpt-oss shapes (the config.json files of openai/gpt-oss-*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200_002,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199_999,
        "rms_norm_eps": 1e-5,
        "rope_scaling": YARN,
        "rope_theta": 150_000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201_088,
    },
    {
        "20b": (2880, 24, 64, 8, 2880, {}),
        "120b": (2880, 36, 64, 8, 2880, {"num_local_experts": 128}),
    },
    tiny={
        "head_dim": 32,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
        "rope_scaling": {"rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "sliding_window": 64,
        "tie_word_embeddings": False,
    },
)
