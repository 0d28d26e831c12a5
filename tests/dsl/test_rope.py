"""RoPE's frequencies and tables against those of transformers, in fp32 and float64; wrong parameters are refused."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config, modeling_rope_utils
from transformers.models.glm4 import modeling_glm4
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3 import modeling_phi3

from surogate_core.dsl.rope import (
    Rope,
    angles_of,
    check_covers,
    covering,
    document_lengths,
    longest_covered,
    longest_fixed,
    of_layer_type,
    rotated,
    scaled_config,
    switches,
)
from surogate_core.errors import UserError
from surogate_testing import tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, original absent": {"rope_type": "yarn", "factor": 2.5},
    "yarn, all parameters": {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "truncate": False,
    },
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    "llama3": LLAMA3,
    "llama3, 32": {**LLAMA3, "factor": 32.0},
    "llama3, original absent": {k: v for k, v in LLAMA3.items() if "original" not in k},
}


def mapping(scaling: dict[str, Any], *, theta: float = 500_000.0, head_dim: int = 128) -> dict[str, Any]:
    return {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "rope_parameters": {**scaling, "rope_theta": theta},
    }


def theirs(config: dict[str, Any], **arguments: Any) -> tuple[torch.Tensor, float]:
    full = Qwen3Config(**{**config, "rope_parameters": dict(config["rope_parameters"])})
    kind = full.rope_parameters["rope_type"]
    if kind == "default":
        return Glm4RotaryEmbedding.compute_default_rope_parameters(full)
    return modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](full, **arguments)


class _Float64(types.ModuleType):
    """torch, with float64 where a function of transformers names fp32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_frequencies_are_those_of_transformers(
    scaling: dict[str, Any], theta: float, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mapping(scaling, theta=theta, head_dim=head_dim)
    rope = Rope(config, head_dim)
    expected, amplitude = theirs(config)
    assert torch.equal(rope.frequencies(), expected)
    assert rope.amplitude == amplitude
    if scaling["rope_type"] != "default":
        monkeypatch.setattr(modeling_rope_utils, "torch", _Float64("torch"))
        expected, _ = theirs(config)
        assert expected.dtype == torch.float64
        torch.testing.assert_close(rope.frequencies(dtype=torch.float64), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("length", [1, 131072, 131073, 262144, 1_000_000])
@pytest.mark.parametrize("factor", [1.0, 2.5, 4.0])
def test_dynamic_frequencies_grow_with_the_document(
    length: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mapping({"rope_type": "dynamic", "factor": factor})
    rope = Rope(config, 128)
    lengths = torch.tensor([length], dtype=torch.int32)
    torch.testing.assert_close(rope.frequencies(lengths)[0], theirs(config, seq_len=length)[0], rtol=3e-7, atol=0)
    monkeypatch.setattr(modeling_rope_utils, "torch", _Float64("torch"))
    found = rope.frequencies(lengths, dtype=torch.float64)[0]
    torch.testing.assert_close(found, theirs(config, seq_len=length)[0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_tables_are_those_of_transformers_past_the_original_length(scaling: dict[str, Any]) -> None:
    config = {**mapping(scaling, head_dim=64), "max_position_embeddings": 16384}
    positions = torch.arange(40_000, dtype=torch.int32)
    tables = Rope(config, 64).tables(positions)
    module = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = module(torch.empty(0), positions[None].long())
    tolerance = 40_000 * 3e-7 if scaling["rope_type"] == "dynamic" else 0.0
    torch.testing.assert_close(tables["cos"], cos[0, :, :32], rtol=0, atol=tolerance)
    torch.testing.assert_close(tables["sin"], sin[0, :, :32], rtol=0, atol=tolerance)


@pytest.mark.parametrize("partial", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", [*SCALINGS, "proportional"])
def test_a_part_of_a_head_has_the_frequencies_of_transformers(name: str, partial: float) -> None:
    scaling = {"rope_type": "proportional", "factor": 2.0} if name == "proportional" else SCALINGS[name]
    config = mapping({**scaling, "partial_rotary_factor": partial}, head_dim=64)
    expected, amplitude = theirs(config)
    rope = Rope(config, 64)
    assert torch.equal(rope.frequencies(), expected)
    assert (rope.amplitude, len(expected)) == (amplitude, 32 if name == "proportional" else 32 * partial)
    flat = {**config, "rope_parameters": None, "rope_theta": 500_000.0, "rope_scaling": {**scaling}}
    assert torch.equal(Rope({**flat, "partial_rotary_factor": partial}, 64).frequencies(), expected)


def longrope(**more: Any) -> dict[str, Any]:
    """A RoPE of heads with 16 features, as a configuration has it."""
    short, long = [1.0 + i / 8 for i in range(8)], [1.0 + 2 * i for i in range(8)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **more}


@pytest.mark.parametrize(
    ("more", "beside"),
    [
        ({}, {"original_max_position_embeddings": 4096}),
        ({"original_max_position_embeddings": 4096}, {}),
        ({"original_max_position_embeddings": 4096, "factor": 8.0}, {}),
        ({"original_max_position_embeddings": 4096, "factor": 0.5}, {}),
        ({"attention_factor": 1.25}, {"original_max_position_embeddings": 4096}),
        ({"rope_type": None, "type": "su"}, {"original_max_position_embeddings": 4096}),
        ({"rope_type": None, "type": "yarn"}, {"original_max_position_embeddings": 4096}),
    ],
)
def test_longrope_has_short_and_long_factors(more: dict[str, Any], beside: dict[str, Any]) -> None:
    config = {**mapping(longrope(**more), head_dim=16), **beside}
    rope = Rope(config, 16)
    given = longrope(**{**more, "rope_type": "longrope"})
    given |= {"original_max_position_embeddings": 4096}
    for length in (4096, 4097):
        expected, amplitude = theirs(mapping(given, head_dim=16), seq_len=length)
        assert torch.equal(rope.frequencies(torch.tensor([length]))[0], expected)
        assert rope.amplitude == amplitude
    assert (longest_covered(config), longest_fixed(config)) == (131072, 4096)
    assert switches(config) == {4096}
    assert [angles_of(config, length) for length in (1, 4096, 4097, 9999)] == [(0,), (0,), (1,), (1,)]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"long_factor": None}, r"`rope_scaling\.long_factor` must be 8 numbers above 0, .* not None.*own config"),
        ({"short_factor": [1.0] * 7}, r"`rope_scaling\.short_factor` must be 8 numbers .* not 7 values"),
        ({"short_factor": [0.0] * 8}, r"`rope_scaling\.short_factor` must be 8 numbers"),
    ],
)
def test_factors_of_longrope_that_cannot_be_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rope({"max_position_embeddings": 4096, "rope_scaling": longrope(**more)}, 16)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("partial", [0.5, 1.0])
def test_scores_of_rotated_heads_are_those_of_transformers(interleaved: bool, partial: float) -> None:
    rope = Rope(mapping({"rope_type": "default", "partial_rotary_factor": partial}, head_dim=16), 16)
    tables = rope.tables(torch.arange(9, dtype=torch.int32))
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(9, 3, 16, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cos, sin = (torch.cat((tables[name],) * 2, -1)[None] for name in ("cos", "sin"))
    modeling = modeling_glm4 if interleaved else modeling_phi3
    expected = [x[0] for x in modeling.apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)]
    found = [rotated(x, tables["cos"], tables["sin"], interleaved=interleaved) for x in (q, k)]
    scores = [torch.einsum("nhe,mhe->hnm", *pair) for pair in (expected, found)]
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad(one.square().sum(), (q, k)) for one in scores]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_of_a_packed_document_are_those_of_it_alone(kind: str) -> None:
    scaling = longrope(original_max_position_embeddings=8) if kind == "longrope" else SCALINGS["dynamic"]
    config = {**mapping(scaling, head_dim=16), "max_position_embeddings": 8}
    rope = Rope(config, 16)
    documents = [torch.arange(n, dtype=torch.int32) for n in (5, 30, 1, 12)]
    packed = rope.tables(torch.cat(documents))
    alone = [rope.tables(d) for d in documents]
    for name in ("cos", "sin"):
        assert torch.equal(packed[name], torch.cat([a[name] for a in alone]))


def test_document_lengths() -> None:
    positions = torch.tensor([0, 1, 2, 0, 0, 1], dtype=torch.int32)
    assert document_lengths(positions).tolist() == [3, 3, 3, 1, 2, 2]


@pytest.mark.parametrize(
    ("rope", "theta", "kind"),
    [
        ({}, 1e4, "default"),
        ({"rope_theta": 5e3}, 5e3, "default"),
        ({"rope_theta": 5e3, "rope_scaling": None}, 5e3, "default"),
        ({"rope_parameters": {"rope_theta": 5e3}}, 5e3, "default"),
        ({"rope_theta": 7e3, "rope_parameters": {"rope_theta": 5e3, "rope_type": "default"}}, 5e3, "default"),
        ({"rope_theta": 5e3, "rope_scaling": {"type": "linear", "factor": 2.0}}, 5e3, "linear"),
        ({"rope_theta": 5e3, "rope_scaling": {"type": "x", "rope_type": "linear", "factor": 2}}, 5e3, "linear"),
        (
            {"rope_scaling": {"rope_theta": 5e3}, "rope_parameters": {"rope_theta": 5e3}},
            5e3,
            "default",
        ),
    ],
)
def test_parameters_are_read_where_each_version_writes_them(rope: dict[str, Any], theta: float, kind: str) -> None:
    read = Rope(rope, 16)
    assert (read.theta, read.kind) == (theta, kind)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 4.0}}, "`rope_scaling`: RoPE scaling `spiral`.*Fix"),
        ({"rope_scaling": {"type": "linear"}}, "`rope_scaling`: RoPE scaling `linear` needs `factor`.*Fix"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "`llama3` needs `low_freq_factor`.*Fix"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, r"`rope_scaling\.high_freq_factor`.*above 1, not 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, r"`rope_scaling\.factor`.*at least 1, not 0\.5"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"`rope_scaling\.factor` must be a number.*not '2'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, r"`rope_scaling\.factor`.*not True"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, r"`rope_scaling\.factor`.*not nan"),
        ({"rope_scaling": "linear"}, "`rope_scaling` must be an object, not 'linear'"),
        ({"rope_theta": "big"}, r"`rope_parameters\.rope_theta` must be a number above 1, not 'big'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by layer type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "`partial_rotary_factor`.*Fix"),
        ({"partial_rotary_factor": 0.1}, "`partial_rotary_factor` is 0.1: 1 of 16 features of a head.*Fix"),
        ({"partial_rotary_factor": 1.5}, "`partial_rotary_factor` must be at most 1, not 1.5"),
        ({"partial_rotary_factor": "half"}, "`partial_rotary_factor` must be a number above 0, not 'half'"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "`rope_scaling` and `rope_parameters` are both given and differ.*Fix",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "max_position_embeddings": None}, "`max_position_emb"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": -1}}, r"`rope_scaling\.attention_factor`"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Rope({"max_position_embeddings": 4096, **rope}, 16)


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(UserError, match="`head_dim` must be even for RoPE, not 15"):
        Rope({}, 15)


OLD = {"max_position_embeddings": 4096, "rope_theta": 5e3}
NEW = {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}


@pytest.mark.parametrize("config", [OLD, NEW], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_kind_by_name_stretches_the_models_positions(kind: str, config: dict[str, Any]) -> None:
    changed = scaled_config(config, kind, 12288)
    assert changed["max_position_embeddings"] == (4096 if kind == "dynamic" else 12288)
    rope = Rope(changed, 16)
    assert (rope.kind, rope.theta, rope.parameters["factor"]) == (kind, 5e3, 3.0)
    given = {"type": kind, "factor": 3.0, "original_max_position_embeddings": 4096, "rope_theta": 5e3}
    expected = Rope({"max_position_embeddings": 4096, "rope_scaling": given}, 16)
    positions = torch.arange(6000, dtype=torch.int32)
    assert torch.equal(rope.tables(positions)["cos"], expected.tables(positions)["cos"])
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(**{"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, **changed})
    )
    cos = theirs(torch.empty(0), positions[None].long())[0][0, :, :8]
    torch.testing.assert_close(rope.tables(positions)["cos"], cos, rtol=0, atol=6000 * 3e-7 if kind == "dynamic" else 0)


def test_positions_alone_leave_the_frequencies() -> None:
    scaled = {**OLD, "rope_scaling": {k: v for k, v in LLAMA3.items() if "original" not in k}}
    for config in (OLD, NEW, scaled):
        changed = scaled_config(config, None, 8192)
        assert changed["max_position_embeddings"] == 8192
        assert torch.equal(Rope(changed, 16).frequencies(), Rope(config, 16).frequencies())


def test_a_mapping_is_taken_as_it_is() -> None:
    given = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048, "beta_fast": 16}
    changed = scaled_config({**OLD, "rope_scaling": LLAMA3}, given, None)
    assert changed["rope_scaling"] == {"rope_type": "yarn", **{k: v for k, v in given.items() if k != "type"}}
    assert Rope(changed, 16).theta == 5e3
    assert scaled_config(OLD, {"type": "linear"}, 8192)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert Rope(scaled_config({**OLD, "rope_scaling": LLAMA3}, {"rope_type": "default"}, None), 16).kind == "default"


@pytest.mark.parametrize(
    ("config", "scaling", "positions", "message"),
    [
        (OLD, "yarn", None, "rope_scaling: yarn.*Fix: set max_model_len above the model's 4096"),
        (OLD, "linear", 4096, "rope_scaling: linear.*Fix"),
        (OLD, {"type": "linear"}, None, "rope_scaling: linear.*Fix"),
        ({**OLD, "rope_scaling": LLAMA3}, "yarn", 8192, "already has RoPE scaling `llama3`.*Fix"),
        (OLD, {"type": "dynamic", "factor": 3.0}, 8192, "max_model_len: dynamic.*Fix"),
        ({**OLD, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, 8192, "max_model_len: dynamic.*Fix"),
        ({"rope_theta": 5e3}, "yarn", 8192, "`max_position_embeddings`"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(
    config: dict[str, Any], scaling: str | dict[str, Any] | None, positions: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        scaled_config(config, scaling, positions)


# ------------------------------------------------------------------------ how far positions go


@pytest.mark.parametrize(
    ("config", "covered"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 4096),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, float("inf")),
        ({}, float("inf")),
    ],
)
def test_a_document_must_not_go_beyond_the_positions(config: dict[str, Any], covered: float) -> None:
    assert longest_covered(config) == covered
    if covered == float("inf"):
        check_covers(longest_covered(config), 1 << 40)
        return
    end = int(covered)
    check_covers(longest_covered(config), end)
    fix = rf"Fix: sequence_len={end} or max_length={end}, .* rope_scaling=yarn max_model_len={end + 1}\."
    with pytest.raises(UserError, match=rf"has {end + 1:,} tokens, but the model's positions end at {end:,} .* {fix}"):
        check_covers(longest_covered(config), end + 1)


def test_a_rope_for_each_layer_type_is_the_familys_to_read() -> None:
    plain, stretched = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "factor": 8.0}
    config = {
        **mapping({}),
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "rope_parameters": {"sliding_attention": plain, "full_attention": stretched},
    }
    assert longest_covered(config) == 8 * 4096
    assert longest_fixed(config) == float("inf")
    assert covering(config, 1 << 20) == config

    class Layered(tiny.TinyModel):
        pass

    class Endless(tiny.TinyModel):
        positions = float("inf")

    assert Layered(config).positions == 8 * 4096
    assert Layered(config).fixed_positions == float("inf")
    assert Layered(config).covering(1 << 20) == config
    assert Endless(config).positions == float("inf")
    with pytest.raises(
        UserError, match=r"RoPE by layer type \(sliding_attention, full_attention\) is not available here"
    ):
        Rope(config, 128)
    assert Rope(of_layer_type(config, "sliding_attention"), 128).kind == "default"
    assert Rope(of_layer_type(config, "full_attention"), 128).kind == "linear"
    with pytest.raises(UserError, match="`rope_parameters` has no RoPE for layers of type `chunked_attention`"):
        of_layer_type(config, "chunked_attention")
    with pytest.raises(UserError, match="`rope_scaling` and `rope_parameters` are both given and differ"):
        Rope(of_layer_type({**config, "rope_scaling": LLAMA3}, "full_attention"), 128)
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    config["rope_parameters"] = {"sliding_attention": plain, "full_attention": dynamic}
    assert (longest_covered(config), longest_fixed(config)) == (float("inf"), 4096)
    assert switches(config) == frozenset()
    assert [angles_of(config, length) for length in (1, 4096, 4097)] == [(4096,), (4096,), (4097,)]


@pytest.mark.parametrize("name", SCALINGS)
def test_a_model_from_scratch_gets_positions_where_no_angle_depends_on_them(name: str) -> None:
    config = mapping(SCALINGS[name])
    assert covering(config, 131072) == config
    longer = covering(config, 200_000)
    if longer["max_position_embeddings"] == 200_000:
        positions = torch.arange(0, 200_000, 997)
        before, after = Rope(config, 128).tables(positions), Rope(longer, 128).tables(positions)
        assert all(torch.equal(before[table], after[table]) for table in before)
    else:
        assert longer == config
        assert name == "dynamic" or "absent" in name or name == "yarn, attention factor"
