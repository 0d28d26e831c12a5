"""Published Qwen3-MoE shapes (the config.json files of Qwen/Qwen3-*-A*), and one for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _config(**keys: Any) -> Mapping[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
        **keys,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _config(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        intermediate_size=384,
        mlp_only_layers=[0],
        vocab_size=1024,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "30b-a3b": _config(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        moe_intermediate_size=768,
        intermediate_size=6144,
    ),
    "235b-a22b": _config(
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        moe_intermediate_size=1536,
        intermediate_size=12288,
    ),
}
