"""Published shapes (the text configurations of Qwen/Qwen3.5-9B and Qwen/Qwen3.5-35B-A3B), and one for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.plugin import bundles


def _experts(count: int, choices: int, features: int, shared: int) -> Mapping[str, Any]:
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": count,
        "num_experts_per_tok": choices,
        "moe_intermediate_size": features,
        "shared_expert_intermediate_size": shared,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def _rope(theta: float, partial: float = 0.25) -> Mapping[str, Any]:
    return {
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": partial,
            "rope_theta": theta,
            "rope_type": "default",
        }
    }


PRESETS = bundles.decoder_presets(
    {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 248_320,
        **_rope(10_000_000.0),
    },
    {
        "9b": (4096, 32, 16, 4, 12_288, {}),
        "35b-a3b": (2048, 40, 16, 2, 512, _experts(256, 8, 512, 512)),
    },
    tiny={
        "head_dim": 32,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        **_rope(10_000.0, 0.5),
    },
)
