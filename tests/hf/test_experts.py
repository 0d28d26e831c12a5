"""Experts in model directories: in tensors of their own, in one of all, over several shards, missing or misshapen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quantised
import torch
from mixture import CONFIG, Mixture
from safetensors.torch import save_file
from torch import Tensor

from surogate_core.dsl.experts import expanded
from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.errors import UserError
from surogate_core.hf.weights import INDEX, SINGLE, ModelDir

MODEL = Mixture(CONFIG)
FUSED = MODEL.fused_tensors()


def shapes_of(model: Mixture) -> dict[str, tuple[int, ...]]:
    """Name → shape of the tensors in a file."""
    return {
        name: shape
        for spec in distinct(pieces(model, lora=None, max_seqlen=8))
        for name, shape in expanded(spec.hf_name, spec.shape).items()
    }


SHAPES = shapes_of(MODEL)


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def fused(found: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(found)
    for name, one in FUSED.items():
        parts = [found.pop(part).reshape(-1) for part, _ in one.parts]
        found[name] = torch.cat(parts).view(one.shape)
    return found


def written(path: Path, found: dict[str, Tensor], *, shards: int = 1) -> ModelDir:
    (path / "config.json").write_text(json.dumps({"model_type": "mixture"}))
    if shards == 1:
        save_file(found, path / SINGLE)
    else:
        where = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(found)}
        for shard in set(where.values()):
            save_file({name: found[name] for name in found if where[name] == shard}, path / shard)
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return ModelDir.open(path).with_experts(FUSED)


@pytest.mark.parametrize("shards", [1, 5])
@pytest.mark.parametrize("one_tensor", [False, True], ids=["apart", "fused"])
def test_every_expert_is_read(tmp_path: Path, one_tensor: bool, shards: int) -> None:
    expected = tensors()
    opened = written(tmp_path, fused(expected) if one_tensor else expected, shards=shards)
    assert opened.check(SHAPES) == ()
    assert set(opened.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(opened.get(name), tensor), name
        target = torch.empty(tensor.shape, dtype=torch.bfloat16)
        opened.copy_into(name, target)
        assert torch.equal(target, tensor.bfloat16()), name


SIZES = {**CONFIG, "hidden_size": 64, "intermediate_size": 32}
WIDER = Mixture(SIZES)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "fused"])
@pytest.mark.parametrize("method", quantised.METHODS)
def test_quantised_experts_are_read(tmp_path: Path, method: str, apart: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=draw) for name, shape in shapes_of(WIDER).items()}
    made, wide = quantised.quantised(method, drawn)
    if not apart:
        made, wide = quantised.in_one(method, drawn, WIDER.fused_tensors())
    config = {"model_type": "mixture", "quantization_config": quantised.METHODS[method][1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, tmp_path / SINGLE)
    opened = ModelDir.open(tmp_path).with_experts(WIDER.fused_tensors())
    assert [name for name in opened.check(shapes_of(WIDER)) if not name.endswith("input_scale")] == []
    for name, tensor in wide.items():
        target = torch.empty(tensor.shape)
        opened.copy_into(name, target)
        assert torch.equal(target, tensor), name
        assert opened.is_quantised(name) == name.endswith("_proj.weight"), name


def test_scales_that_belong_to_two_projections_are_refused(tmp_path: Path) -> None:
    codes = torch.zeros(6, 48, 32).to(torch.float8_e4m3fn)
    found = fused(tensors())
    found["layers.1.experts.gate_up_proj"] = codes
    found["layers.1.experts.gate_up_proj_scale_inv"] = torch.ones(6, 2, 1)
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixture", "quantization_config": config}))
    save_file(found, tmp_path / SINGLE)
    with pytest.raises(UserError, match=r"has scales of 32 rows that belong to two projections, which have 24 and 24"):
        ModelDir.open(tmp_path).with_experts(FUSED)


def test_a_fused_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    found = fused(tensors())
    found["layers.1.experts.gate_up_proj"] = found["layers.1.experts.gate_up_proj"].transpose(1, 2).contiguous()
    with pytest.raises(UserError) as caught:
        written(tmp_path, found)
    message = str(caught.value)
    assert (
        "layers.1.experts.gate_up_proj is F32 [6, 32, 48] in model.safetensors, the model needs [6, 48, 32]" in message
    )
    assert "Fix: use the config.json and the weights of one and the same model" in message


def test_what_is_missing_or_misshapen_is_named(tmp_path: Path) -> None:
    found = tensors()
    del found["layers.1.experts.4.up_proj.weight"]
    del found["layers.1.router.weight"]
    found["layers.1.experts.2.down_proj.weight"] = torch.zeros(32, 12)
    with pytest.raises(UserError) as caught:
        written(tmp_path, found, shards=3).check(SHAPES)
    message = str(caught.value)
    assert "layers.1.experts.4.up_proj.weight is missing" in message
    assert "layers.1.router.weight is missing" in message
    assert "layers.1.experts.2.down_proj.weight has shape [32, 12] in model-" in message
    assert message.count("\n  - ") == 3


def test_other_names_for_all_experts_are_reported_at_once(tmp_path: Path) -> None:
    found = {name.replace("gate_proj", "w1").replace("up_proj", "w3"): tensor for name, tensor in tensors().items()}
    with pytest.raises(UserError, match=r"(?s)is missing.*… and \d+ more") as caught:
        written(tmp_path, found).check(SHAPES)
    assert len(str(caught.value).splitlines()) == 15, "a dozen are listed"
