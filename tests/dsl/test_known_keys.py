"""Keys that change what a model computes: every family refuses those that it does not read, whatever the model is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
from transformers import AutoConfig

from surogate_core.dsl import Model
from surogate_core.dsl.decoder import Decoder
from surogate_core.dsl.known_keys import DROPOUT, KNOWN, check_keys
from surogate_core.errors import UserError
from surogate_core.plugins.registry import Registry

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
CHANGED: dict[str, Any] = {
    "sliding_window": 64,
    "layer_types": ["full_attention", "sliding_attention"],
    "no_rope_layers": [1, 0],
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 8.0,
    "query_pre_attn_scalar": 256,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_method": "noaux_tc",
    "add_swa_attention_sink_bias": True,
    "clip_qkv": 8.0,
    "partial_rotary_factor": 0.5,
    "rope_interleave": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu",
    "is_causal": False,
    "kv_lora_rank": 512,
    "attn_output_gate": True,
    "num_kv_shared_layers": 2,
    "full_attention_interval": 4,
    "total_ut_steps": 4,
}
NEUTRAL: dict[str, Any] = {
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    "no_rope_layers": [1, 1],
    "no_rope_layer_interval": 4,
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1,
    "attention_multiplier": 8**-0.5,
    "query_pre_attn_scalar": 8,
    "logits_scaling": 1.0,
    "shared_expert_intermediate_size": 0,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "hidden_act": "swish",
    "is_causal": True,
    "attention_dropout": 0.0,
    "pretraining_tp": 2,
    "a_key_that_nobody_knows": 0.5,
    "auto_map": {"AutoModel": "x.Y"},
}


@pytest.fixture(params=FAMILIES)
def build(request: pytest.FixtureRequest, installed: Registry) -> Callable[..., Model]:
    """Builds a model of a family, from what transformers writes for it and some more keys."""
    family = next(one for one in installed.all("model").values() if request.param in one.hf_model_types)
    moe = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(request.param, **SIZES, **(moe if "moe" in request.param else {})).to_dict()

    def start(**more: Any) -> Model:
        return family.build({**config, **more})

    return start


def test_what_transformers_writes_and_neutral_values_are_allowed(build: Callable[..., Model]) -> None:
    assert build().vocab_size == 64
    assert build(**NEUTRAL).vocab_size == 64


def test_a_family_refuses_what_it_does_not_compute(build: Callable[..., Model]) -> None:
    reads_window = "Llama" not in type(build()).__name__
    for key, value in CHANGED.items():
        if key == "sliding_window" and reads_window:
            build(sliding_window=value)  # transformers gives these a window with use_sliding_window alone
            with pytest.raises(UserError, match="`use_sliding_window` is True"):
                build(sliding_window=value, use_sliding_window=True)
            continue
        with pytest.raises(UserError, match=f"config.json: `{key}` is ") as caught:
            build(**{key: value})
        message = str(caught.value)
        assert "it would be another model. Fix: install a plugin whose model family computes it" in message
        assert not re.search("switch|remove|set it|choose", message)


def test_all_keys_are_in_one_message(build: Callable[..., Model]) -> None:
    keys = ("final_logit_softcapping", "residual_multiplier", "no_rope_layers")
    with pytest.raises(UserError) as caught:
        build(**{key: CHANGED[key] for key in keys})
    assert all(f"\n  - `{key}` is " in str(caught.value) for key in keys)


def test_norms_that_a_family_computes_may_be_said_to_be_there(installed: Registry) -> None:
    for name, value in {"llama": True, "qwen2": True, "qwen3": False, "qwen3_moe": False}.items():
        family = next(one for one in installed.all("model").values() if name in one.hf_model_types)
        config = {**next(iter(family.presets.values())), "use_qk_norm": not value}
        family.build(config)
        with pytest.raises(UserError, match=f"`use_qk_norm` is {value}"):
            family.build({**config, "use_qk_norm": value})


@pytest.mark.parametrize(
    ("config", "acts"),
    [
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": None, "use_sliding_window": None}, False),
        ({"sliding_window": 4096, "max_position_embeddings": 4096}, False),
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, True),
        (
            {
                "sliding_window": 4096,
                "max_position_embeddings": 4096,
                "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            },
            True,
        ),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, False),
        ({"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_a_window_is_refused_where_it_acts(config: Mapping[str, Any], acts: bool) -> None:
    if not acts:
        check_keys(config, family="mine")
        return
    with pytest.raises(UserError, match="a sliding window, which mine does not compute"):
        check_keys(config, family="mine")
    check_keys(config, family="mine", reads=("sliding_window", "layer_types"))


def test_a_window_covers_the_positions_that_the_model_says() -> None:
    """A family whose positions end elsewhere than `max_position_embeddings` says overrides `Model.positions`."""

    class Short(Decoder):
        family, architecture = "short", "ShortForCausalLM"
        defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}
        positions = property(lambda self: 64.0)

    class Long(Decoder):
        family, architecture = "long", "LongForCausalLM"
        defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}
        positions = property(lambda self: math.inf)

    assert Short.build({**SIZES, "sliding_window": 64}).positions == 64
    with pytest.raises(UserError, match="a sliding window, which short does not compute"):
        Short.build({**SIZES, "sliding_window": 63})
    with pytest.raises(UserError, match="a sliding window, which long does not compute"):
        Long.build({**SIZES, "sliding_window": 128})


def test_a_family_says_what_it_reads_and_computes() -> None:
    config = {"residual_multiplier": 0.22, "rope_interleave": True}
    check_keys(config, family="mine", reads=("residual_multiplier",), computes={"rope_interleave": True})
    with pytest.raises(UserError, match="`rope_interleave` is False, and mine computes True alone"):
        check_keys({"rope_interleave": False}, family="mine", computes={"rope_interleave": True})


def test_dropout_says_that_it_acts_in_training_alone() -> None:
    with pytest.raises(UserError, match=r"trains without dropout.* the model is the same"):
        check_keys({"resid_pdrop": 0.1}, family="mine")
    check_keys({"resid_pdrop": 0.1}, family="mine", reads=("resid_pdrop",))


def test_every_key_has_a_meaning_and_null_is_none() -> None:
    check_keys(dict.fromkeys((*KNOWN, *DROPOUT)), family="mine")
    assert all(known.what and known.neutral for known in KNOWN.values())
    assert not KNOWN.keys() & DROPOUT
