"""The flat groups: offsets, dtypes, decay, what is handed out."""

from __future__ import annotations

import math
from typing import Any

import decaying
import pytest
import surogate_recipe_fp8
import torch
from surogate_model_qwen3.model import build
from surogate_quant_nf4 import NF4Options
from surogate_quant_nf4.nf4 import NF4
from tiny_qwen3 import make_engine, tiny_config

from surogate_core.bundles import FLAT_ALIGNMENT
from surogate_core.dsl import Dim, Param, Stack
from surogate_core.dsl.declare import LoRA
from surogate_core.dsl.slots import Adapter
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.planning.pieces import RandomSource, distinct, pieces
from surogate_core.engine.stores import DeviceStore
from surogate_testing import tiny
from surogate_testing.recipes import built

CPU = torch.device("cpu")
FP8, QUANT = built(surogate_recipe_fp8.surogate_recipe(), CPU), NF4(NF4Options())


def make_parameters(
    *,
    adapters: LoRA | None = None,
    dtype: torch.dtype = torch.float32,
    adapter_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Parameters:
    found = pieces(build(tiny_config(attention_bias=True)), lora=adapters, max_seqlen=8)
    parameters = Parameters(
        found,
        weights=DeviceStore("weights"),
        device=CPU,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        weight_decay=0.1,
        **options,
    )
    parameters.fill(RandomSource(seed=0, std=0.02, device=CPU))
    return parameters


@pytest.mark.parametrize("adapters", [None, tiny.lora()], ids=["full", "lora"])
def test_groups_are_flat_aligned_and_do_not_overlap(adapters: LoRA | None) -> None:
    parameters = make_parameters(adapters=adapters)
    names = [n for g in parameters.groups for n in g.shapes]
    assert sorted(names) == sorted(parameters.masters())
    for group in parameters.groups:
        end = 0
        for name, (offset, shape) in group.shapes.items():
            assert offset % FLAT_ALIGNMENT == 0
            assert offset >= end
            end = offset + math.prod(shape)
            master = parameters.masters()[name]
            assert master.shape == shape
            assert master.data_ptr() == group.master[offset:].data_ptr()
            assert parameters.gradients_by_name()[name].data_ptr() == group.grad[offset:].data_ptr()
        assert group.master.shape == group.grad.shape
        assert group.master.dtype == group.grad.dtype == torch.float32
        assert len(group.master) - end < FLAT_ALIGNMENT


def test_hidden_matrices_are_named() -> None:
    """Those that an optimizer for matrices takes: no embedding, head, norm, bias or adapter."""
    groups = make_parameters().groups
    hidden = {name for group in groups for name in group.hidden}
    shapes = {name: shape for group in groups for name, (_, shape) in group.shapes.items()}
    assert hidden == {name for name in shapes if ".layers." in name and name.endswith("_proj.weight")}
    assert all(len(shapes[name]) == 2 for name in hidden)
    assert not any(group.hidden for group in make_parameters(adapters=tiny.lora()).groups)


def test_norms_and_biases_do_not_decay() -> None:
    groups = {g.name: g for g in make_parameters().groups}
    assert groups["decayed"].weight_decay == 0.1
    assert groups["undecayed"].weight_decay == 0.0
    undecayed = set(groups["undecayed"].shapes)
    assert undecayed == {n for g in groups.values() for n, (_, shape) in g.shapes.items() if len(shape) == 1}
    assert any("bias" in n for n in undecayed)
    assert [g.name for g in make_parameters(adapters=tiny.lora()).groups] == ["decayed"]


def test_fp32_trains_its_masters_without_a_copy_and_bf16_has_one() -> None:
    exact = make_parameters()
    assert not exact.copies
    piece = exact.pieces[1]
    for tensor, spec in zip(exact.inputs(piece), piece.specs, strict=True):
        assert tensor.data_ptr() == exact.masters()[spec.hf_name].data_ptr()
    rounded = make_parameters(dtype=torch.bfloat16)
    name = piece.specs[4].hf_name
    rounded.masters()[name].fill_(1.001)
    before = rounded.inputs(rounded.pieces[1])[4].clone()
    rounded.refresh()
    after = rounded.inputs(rounded.pieces[1])[4]
    assert after.dtype == torch.bfloat16
    assert not torch.equal(before, after)
    assert torch.equal(after, rounded.masters()[name].bfloat16())


def test_bf16_masters_are_what_bf16_computes_with_and_fp32_has_a_copy_of() -> None:
    seed = torch.zeros((), dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        parameters = make_parameters(dtype=dtype, master_dtype=torch.bfloat16, seed=seed)
        assert {(g.master.dtype, g.grad.dtype) for g in parameters.groups} == {(torch.bfloat16, torch.float32)}
        assert [g.number for g in parameters.groups] == [0, 1]
        assert all(g.seed is seed for g in parameters.groups)
        assert bool(parameters.copies) == (dtype == torch.float32)
        piece = parameters.pieces[1]
        for tensor, spec in zip(parameters.inputs(piece), piece.specs, strict=True):
            assert tensor.dtype == dtype
            assert torch.equal(tensor, parameters.masters()[spec.hf_name].to(dtype))
    adapted = make_parameters(adapters=tiny.lora(), master_dtype=torch.bfloat16, seed=seed)
    assert {t.dtype for _, t in adapted.adapter_tensors()} == {torch.float32}


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
def test_adapters_have_a_dtype_of_their_own(adapter_dtype: torch.dtype) -> None:
    adapter = Adapter(rank=2, scale=1.0, dropout=0.0, dtype=adapter_dtype)
    adapters = LoRA(adapter=adapter, targets=frozenset(["q_proj"]))
    parameters = make_parameters(adapters=adapters, dtype=torch.bfloat16, adapter_dtype=adapter_dtype)
    piece = parameters.pieces[1]
    for tensor, spec in zip(parameters.inputs(piece), piece.specs, strict=True):
        assert tensor.shape == spec.shape
        assert tensor.dtype == (adapter_dtype if spec.role == "adapter" else torch.bfloat16)
    assert {n: t.dtype for n, t in parameters.adapter_tensors()} == dict.fromkeys(parameters.masters(), torch.float32)


@pytest.mark.parametrize("adapters", [None, tiny.lora()], ids=["full", "lora"])
def test_a_parameter_in_fp32_stays_there(adapters: LoRA | None) -> None:
    """Beside bf16 weights and bf16 masters, in programs and in exports, trained and frozen."""
    source = RandomSource(seed=0, std=0.02, device=CPU)
    made = tiny.engine(
        tiny.SMALL_CONFIG,
        build=decaying.Decaying,
        lora=adapters,
        source=source,
        dtype=torch.bfloat16,
        master_dtype=torch.bfloat16,
        optimizer=tiny.ADAMW,
    )
    parameters = made.parameters
    wide = [spec for spec in parameters.specs.values() if spec.hf_name.endswith(decaying.FP32)]
    assert len(wide) == 4
    tiny.train(made, 3)
    programs = {
        spec.hf_name: tensor
        for piece in parameters.pieces
        for spec, tensor in zip(piece.specs, parameters.inputs(piece), strict=True)
    }
    exported = dict(parameters.base_tensors())
    for spec in wide:
        value = exported[spec.hf_name]
        assert value.dtype == programs[spec.hf_name].dtype == torch.float32
        assert torch.equal(value, programs[spec.hf_name])
        assert not torch.equal(value, value.bfloat16().float())
        assert torch.equal(value, source(spec)) == (adapters is not None), "a frozen one has the values of its source"
        if adapters is None:
            assert parameters.masters()[spec.hf_name].dtype == torch.float32
            assert torch.equal(value, parameters.masters()[spec.hf_name])
    others = {t.dtype for name, t in exported.items() if not name.endswith(decaying.FP32)}
    assert others == {torch.bfloat16}


def test_parameters_in_fp32_stay_beside_packed_weights_and_come_back_from_a_checkpoint() -> None:
    keys: dict[str, Any] = {"build": decaying.Decaying, "dtype": torch.bfloat16, "optimizer": tiny.ADAMW}
    for more in ({"recipe": FP8}, {"lora": tiny.lora(), "weight_format": QUANT}):
        tiny.ensure_resumes(lambda more=more: tiny.engine(tiny.SMALL_CONFIG, **keys, **more))  # type: ignore[misc]


def test_parameters_in_fp32_have_groups_of_their_own() -> None:
    made = tiny.engine(tiny.SMALL_CONFIG, build=decaying.Decaying, weight_decay=0.1)
    groups = {group.name: group for group in made.parameters.groups}
    assert [*groups] == ["decayed", "undecayed", "decayed_fp32", "undecayed_fp32"]
    assert [group.weight_decay for group in groups.values()] == [0.1, 0.0, 0.1, 0.0]
    assert [group.number for group in groups.values()] == [0, 1, 2, 3]
    assert groups["undecayed_fp32"].shapes.keys() == {"layers.0.decay", "layers.1.decay"}
    assert groups["decayed_fp32"].hidden == {"layers.0.mix.weight", "layers.1.mix.weight"}


def test_filters_of_a_convolution_are_no_hidden_matrices() -> None:
    class Filtered(tiny.SmallBlock):
        filters = Param("conv.weight", Dim("hidden_size"), 1, 4, init="normal", role="weight")

    class Model(tiny.SmallModel):
        layers = Stack(Filtered, Dim("num_hidden_layers"), "layers.{i}.")

    found = pieces(Model(tiny.SMALL_CONFIG), lora=None, max_seqlen=8)
    parameters = Parameters(
        found,
        weights=DeviceStore("weights"),
        device=CPU,
        dtype=torch.float32,
        adapter_dtype=torch.float32,
        weight_decay=0.1,
    )
    (decayed, _) = parameters.groups
    assert "layers.0.conv.weight" in decayed.shapes
    assert decayed.hidden == {f"layers.{i}.{name}_proj.weight" for i in (0, 1) for name in ("up", "down")}


def test_every_tensor_comes_out_as_it_went_in() -> None:
    source = RandomSource(seed=3, std=1.0, device=CPU)
    specs = list(distinct(pieces(build(tiny_config()), lora=tiny.lora(), max_seqlen=8)))
    values = {s.hf_name: source(s) for s in specs}
    engine = make_engine(lora=tiny.lora(), source=tiny.tensor_source(values))
    out = {**dict(engine.parameters.base_tensors()), **dict(engine.parameters.adapter_tensors())}
    assert out.keys() == values.keys()
    assert all(torch.equal(out[n], v) for n, v in values.items())
    total, trained = engine.parameters.counts()
    assert total == sum(v.numel() for v in values.values())
    assert trained == sum(v.numel() for n, v in values.items() if "lora" in n)


def test_a_source_of_the_wrong_shape_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"model\.embed_tokens\.weight"):
        make_engine(source=lambda spec: torch.zeros(2, 2))
