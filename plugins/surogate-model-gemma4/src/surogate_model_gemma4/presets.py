"""Published Gemma 4 shapes (the text configurations of google/gemma-4-*)."""

from __future__ import annotations

from surogate_core.plugin import bundles

ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
}
SMALL = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}


def _types(layers: int, full_every: int = 6) -> list[str]:
    return ["sliding_attention" if number % full_every else "full_attention" for number in range(1, layers + 1)]


PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROPES,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "vocab_size": 262_144,
    },
    {
        "26b-a4b": (2816, 30, 16, 8, 2112, {**EXPERTS, "num_global_key_value_heads": 2, "layer_types": _types(30)}),
        "e2b": (
            *(1536, 35, 8, 1, 6144),
            {**SMALL, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "layer_types": _types(35, 5)},
        ),
        "e4b": (2560, 42, 8, 2, 10_240, {**SMALL, "num_kv_shared_layers": 18, "layer_types": _types(42)}),
        "31b": (5376, 60, 32, 16, 21_504, {"num_global_key_value_heads": 4, "layer_types": _types(60)}),
    },
    tiny={
        **EXPERTS,
        "global_head_dim": 64,
        "head_dim": 32,
        "layer_types": _types(4, 2),
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_global_key_value_heads": 1,
        "pad_token_id": None,
        "rope_theta": None,
        "sliding_window": 64,
        "top_k_experts": 2,
    },
)
