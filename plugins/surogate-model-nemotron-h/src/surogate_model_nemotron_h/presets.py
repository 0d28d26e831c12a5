"""Published shapes (the config.json files of nvidia/NVIDIA-Nemotron-*), and one for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMMON: Mapping[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "residual_in_fp32": False,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 1e-4,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131_072,
}
_EXPERTS: Mapping[str, Any] = {
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "topk_group": 1,
}
_NANO_2: Mapping[str, Any] = {
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 40,
}


def _preset(pattern: str, **keys: Any) -> Mapping[str, Any]:
    more = _EXPERTS if "E" in pattern else {}
    return {**_COMMON, **more, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), **keys}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _preset(
        "ME*M-",
        bos_token_id=None,
        eos_token_id=None,
        head_dim=32,
        hidden_size=128,
        intermediate_size=384,
        mamba_head_dim=32,
        mamba_num_heads=8,
        max_position_embeddings=4096,
        moe_intermediate_size=96,
        moe_shared_expert_intermediate_size=192,
        n_groups=2,
        n_routed_experts=8,
        num_attention_heads=4,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        pad_token_id=None,
        routed_scaling_factor=2.5,
        ssm_state_size=16,
        time_step_min=1e-9,  # transformers limits time steps by it, instead of by time_step_limit
        vocab_size=1024,
    ),
    "nano-9b-v2": _preset(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        hidden_size=4480,
        intermediate_size=15_680,
        **_NANO_2,
    ),
    "nano-12b-v2": _preset(
        "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        hidden_size=5120,
        intermediate_size=20_480,
        **_NANO_2,
    ),
    "3-nano-4b": _preset(
        "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
        chunk_size=256,
        hidden_size=3136,
        intermediate_size=12_544,
        mamba_head_dim=80,
        mamba_num_heads=96,
        max_position_embeddings=262_144,
        num_attention_heads=40,
    ),
    "3-nano-30b-a3b": _preset(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        hidden_size=2688,
        intermediate_size=1856,
        mamba_head_dim=64,
        mamba_num_heads=64,
        max_position_embeddings=262_144,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        num_attention_heads=32,
        num_experts_per_tok=6,
        num_key_value_heads=2,
        routed_scaling_factor=2.5,
    ),
}
