"""Published Qwen3-MoE shapes (the config.json files of Qwen/Qwen3-*-A*), and one for a CPU."""

from __future__ import annotations

from surogate_core.plugin import bundles

PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    {
        "30b-a3b": (2048, 48, 32, 4, 6144, {"moe_intermediate_size": 768}),
        "235b-a22b": (4096, 94, 64, 4, 12288, {"moe_intermediate_size": 1536}),
    },
    tiny={
        "num_hidden_layers": 3,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "mlp_only_layers": [0],
    },
)
