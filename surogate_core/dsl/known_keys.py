"""Keys of ``config.json`` that change what a model computes, for families that do not read them.

A family reads the keys of its own models. A derivative, or a file with a changed ``model_type``, may have keys of other
families, and the model without them is another one. `check_keys` refuses these. A key that nothing here knows is
allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from surogate_core.dsl.dims import not_computed
from surogate_core.dsl.rope import longest_covered
from surogate_core.errors import UserError

Neutral = tuple[Any, ...] | Callable[[Any, Mapping[str, Any], float], bool]


class Known(NamedTuple):
    """A key of known meaning."""

    what: str
    """What it adds, in words."""
    neutral: Neutral
    """Values with which it adds nothing, beside null; or a function of the value, the ``config.json`` and the model's
    positions that says whether it adds nothing.
    """


OFF: Neutral = (False, 0, (), "")
ONE: Neutral = (1,)


def _head_dim(config: Mapping[str, Any]) -> float:
    """The features of a head; NaN, which nothing equals, if the file does not say."""
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (width / heads if width and heads else math.nan)


def _is_head_dim(value: Any, config: Mapping[str, Any], positions: float) -> bool:
    return bool(value == _head_dim(config))


def _is_plain_scale(value: Any, config: Mapping[str, Any], positions: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, _head_dim(config) ** -0.5, rel_tol=1e-4)


def _is_no_window(value: Any, config: Mapping[str, Any], positions: float) -> bool:
    """Whether a window never cuts a document: it is off, no layer has it, or all positions are in it."""
    if config.get("use_sliding_window") is False or not value:
        return True
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple) and kinds and set(kinds) == {"full_attention"}:
        return True
    return isinstance(value, int) and positions <= value


def _is_unused_interval(value: Any, config: Mapping[str, Any], positions: float) -> bool:
    """Whether layers without RoPE are listed, so that their interval is not used."""
    return not value or bool(config.get("no_rope_layers"))


_GROUPS: tuple[tuple[str, Neutral, str], ...] = (
    # ------------------------------------------------------------------- attention
    ("a sliding window", _is_no_window, "sliding_window sliding_window_size attention_window_size"),
    ("sliding windows", OFF, "use_sliding_window"),
    ("attention of another kind in some layers", ("full_attention", ()), "layer_types"),
    ("attention in chunks", OFF, "attention_chunk_size"),
    ("attention to later tokens", OFF, "use_bidirectional_attention"),
    ("attention to later tokens", (True,), "is_causal"),
    (
        "a soft cap of the attention's logits",
        OFF,
        "attn_logit_softcapping attn_logit_softcap attention_logit_softcapping attention_logit_cap attn_softcap",
    ),
    (
        "attention sinks",
        OFF,
        "attention_sink attention_sinks attn_sink attn_sinks use_attention_sink use_attention_sinks use_sinks "
        "add_swa_attention_sink_bias add_full_attention_sink_bias",
    ),
    ("another scale of the attention's logits", _is_plain_scale, "attention_multiplier softmax_scale attention_scale"),
    ("another scale of the attention's logits", _is_head_dim, "query_pre_attn_scalar"),
    ("a scale of the attention's logits that changes with the position", OFF, "attn_temperature_tuning"),
    ("another scale of the attention's logits", ONE, "qk_scale_factor key_multiplier"),
    ("a factor of attention", ONE, "attention_value_scale attention_in_multiplier attention_out_multiplier"),
    (
        "norms of queries and keys",
        OFF,
        "qk_norm use_qk_norm qk_layernorm use_qk_layernorm qk_layer_norms qk_ln qk_norm_type",
    ),
    ("a clip of queries, keys and values", OFF, "clip_qkv qkv_clip qk_l2_clip_threshold"),
    (
        "a gate of attention's output",
        OFF,
        "attn_output_gate attention_output_gate use_attention_gate use_gated_attention gated_attention gating "
        "headwise_attn_output_gate elementwise_attn_output_gate",
    ),
    ("latent attention", OFF, "kv_lora_rank q_lora_rank"),
    ("keys and values that layers share", OFF, "num_kv_shared_layers kv_source_layers"),
    ("sparse attention", OFF, "index_topk index_n_heads"),
    # ------------------------------------------------------------------- positions
    ("layers without RoPE", (1, True, ()), "no_rope_layers"),
    ("layers without RoPE", _is_unused_interval, "no_rope_layer_interval nope_layer_interval"),
    ("positions of another kind", ("rope", "rotary"), "position_embedding_type"),
    ("positions by biases of attention", OFF, "alibi"),
    ("RoPE on a part of each head", ONE, "rotary_pct rope_pct rotary_percent"),
    ("RoPE on a part of each head", _is_head_dim, "rotary_dim"),
    ("RoPE of adjacent features", OFF, "rope_interleave rope_interleaved"),
    (
        "another base of RoPE in some layers",
        OFF,
        "rope_local_base_freq local_rope_theta swa_rope_theta layer_rope_theta compress_rope_theta",
    ),
    # ------------------------------------------------------------------- factors
    (
        "a factor of the embedding",
        ONE,
        "embedding_multiplier scale_emb embedding_scale emb_scale embed_scale",
    ),
    ("a factor of the embedding", OFF, "scale_embedding scale_embeddings mup_enabled use_mup"),
    ("a factor of a block's output", ONE, "residual_multiplier residual_scale"),
    ("a factor of a block's output", OFF, "scale_depth"),
    ("factors of the feed-forward", ONE, "mlp_multipliers"),
    ("a factor of the logits", ONE, "logits_scaling logit_scale logits_scale lm_head_multiplier output_multiplier"),
    ("a factor of the logits", ONE, "logits_mup_width_multiplier"),
    ("a factor of the logits", OFF, "dim_model_base"),
    (
        "a soft cap of the logits",
        OFF,
        "final_logit_softcapping final_logit_softcap logits_soft_cap logit_softcap logit_softcapping "
        "output_logit_soft_cap",
    ),
    # ------------------------------------------------------------------- blocks
    ("another activation", ("silu", "swish"), "hidden_activation mlp_hidden_act"),
    ("limits of the gated activation", OFF, "swiglu_limit swiglu_limits swiglu_alpha mlp_gate_softcap mlp_up_softcap"),
    ("attention and feed-forward side by side", OFF, "use_parallel_residual parallel_attn parallel_residual"),
    ("norms in other places", OFF, "apply_residual_connection_post_layernorm use_post_norm post_norm sandwich_norm"),
    ("biases", OFF, "attention_bias qkv_bias use_qkv_bias mlp_bias use_bias lm_head_bias attention_out_bias"),
    ("layers that are repeated", ONE, "total_ut_steps loop_num_passes"),
    ("several residual streams", OFF, "hc_mult hc_count altup_num_inputs"),
    ("an input of each layer from an own embedding", OFF, "hidden_size_per_layer_input"),
    (
        "layers of other kinds",
        OFF,
        "hybrid_override_pattern layers_block_type block_types full_attention_interval full_attn_idxs "
        "attn_layer_period linear_num_value_heads linear_attn_config conv_L_cache mamba_d_state mamba_num_heads",
    ),
    # ------------------------------------------------------------------- experts
    ("experts", OFF, "num_experts num_local_experts n_routed_experts moe_num_experts enable_moe_block"),
    (
        "experts that every token uses",
        OFF,
        "n_shared_experts num_shared_experts moe_num_shared_experts shared_expert_intermediate_size "
        "shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
        "share_expert_dim zero_expert_num",
    ),
    (
        "another score of experts",
        ("softmax",),
        "scoring_func score_func score_function router_scoring_func moe_router_activation_func expert_selection_fn "
        "moe_router_score_function",
    ),
    (
        "a factor of the experts' output",
        ONE,
        "routed_scaling_factor moe_routed_scaling_factor router_scaling_factor moe_router_scaling_factor route_scale",
    ),
    ("a choice of experts by groups", (0, 1), "n_group topk_group num_expert_group num_limited_groups"),
    ("another choice of experts", ("greedy",), "topk_method"),
    (
        "a bias of the experts' scores",
        OFF,
        "use_expert_bias use_routing_bias moe_router_enable_expert_bias router_bias",
    ),
    ("a soft cap of the router's logits", OFF, "moe_router_logit_softcapping router_logit_softcapping"),
    ("the router's weights on the experts' input", OFF, "moe_apply_router_weight_on_input"),
    ("experts in a narrower space", OFF, "moe_latent_size"),
    (
        "dense layers among those with experts",
        OFF,
        "first_k_dense_replace num_dense_layers moe_layer_start_index moe_layers",
    ),
    (
        "dense layers among those with experts",
        ONE,
        "moe_layer_freq moe_layer_interval interleave_moe_layer_step expert_layer_period",
    ),
    ("layers with experts", ("dense", ()), "mlp_layer_types"),
)

KNOWN: Mapping[str, Known] = {key: Known(what, neutral) for what, neutral, keys in _GROUPS for key in keys.split()}
"""Key → its meaning and the values with which it has none."""

DROPOUT = frozenset(
    """
    attention_dropout attn_pdrop attn_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob
    resid_pdrop resid_dropout residual_dropout embd_pdrop emb_pdrop embedding_dropout dropout dropout_rate
    activation_dropout
    """.split()  # noqa: SIM905
)
"""Keys of dropout, which acts in training alone."""


def check_keys(
    config: Mapping[str, Any],
    *,
    family: str,
    reads: Collection[str] = (),
    computes: Mapping[str, Any] | None = None,
    positions: float | None = None,
) -> None:
    """Raise one `UserError` that names the keys of `config` that change what a model computes and that the family does
    not compute.

    `reads`: keys of `KNOWN` that the family reads, and so checks itself. `computes`: key → the one value that it
    computes, where that is another than without the key. `positions`: `Model.positions`, which a window may cover; by
    default what ``max_position_embeddings`` and RoPE's scaling say.
    """
    computed = computes or {}
    end = longest_covered(config) if positions is None else positions
    problems = [
        problem
        for key, value in config.items()
        if value is not None and key not in reads
        for problem in _problems(key, value, config, end, family, computed)
    ]
    if problems:
        raise not_computed(problems)
    if dropped := sorted(key for key in DROPOUT - set(reads) if config.get(key)):
        raise UserError(
            f"config.json: `{dropped[0]}` is {config[dropped[0]]!r}, and {family} trains without dropout. It acts in "
            f"training alone: with 0 in a copy of config.json the model is the same. Fix: use such a copy, or "
            f"lora_dropout, which adapters have."
        )


def _problems(
    key: str, value: Any, config: Mapping[str, Any], positions: float, family: str, computed: Mapping[str, Any]
) -> Iterator[str]:
    if key in computed:
        if value != computed[key]:
            yield f"`{key}` is {_shown(value)}, and {family} computes {computed[key]!r} alone"
        return
    known = KNOWN.get(key)
    if known is not None and not _is_neutral(value, known.neutral, config, positions):
        yield f"`{key}` is {_shown(value)}: {known.what}, which {family} does not compute"


def _is_neutral(value: Any, neutral: Neutral, config: Mapping[str, Any], positions: float) -> bool:
    if callable(neutral):
        return neutral(value, config, positions)
    if isinstance(value, list | tuple):
        return all(one is None or _is_neutral(one, neutral, config, positions) for one in value)
    if isinstance(value, str):
        return value.lower() in neutral
    return value in neutral


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
