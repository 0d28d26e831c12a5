"""Checkpoints in fine-grained FP8, ModelOpt's NVFP4 and MXFP4: read, trained on, merged, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantised as files
import torch
from quantised import METHODS, SKIPPED
from safetensors.torch import load_file, save_file
from surogate_command_export.merge import merge
from surogate_quant_nvfp4 import surogate_weight_format

from surogate_core.errors import ConfigError, UserError
from surogate_core.hf.prequantised import Scheme
from surogate_core.hf.weights import ModelDir
from surogate_core.plugins.registry import Registry
from surogate_testing.weight_formats import built

Run = Callable[..., int]
LORA = ["lora=true", "lora_rank=4"]


@pytest.fixture(params=METHODS)
def quantised(request: pytest.FixtureRequest, hf_dir: Path, tmp_path: Path) -> tuple[str, Path, Path]:
    """(method, the checkpoint, what it stands for in fp32) of a model whose projections are quantised, but for one."""
    method: str = request.param
    made, wide = files.quantised(method, load_file(hf_dir / "model.safetensors"))
    directory = files.write(tmp_path / "quantised", hf_dir, made, method=method)
    return method, directory, files.write(tmp_path / "plain", hf_dir, wide)


def test_weights_are_what_the_format_says(quantised: tuple[str, Path, Path]) -> None:
    method, directory, plain = quantised
    opened, expected_dir = ModelDir.open(directory), ModelDir.open(plain)
    assert opened.scheme is not None
    assert sorted(opened.names()) == sorted(expected_dir.names())
    shapes = {name: expected_dir.shape(name) for name in expected_dir.names()}
    assert {name: opened.shape(name) for name in opened.names()} == shapes
    assert opened.check(shapes) == ()
    for name, shape in shapes.items():
        target = torch.empty(shape)
        opened.copy_into(name, target)
        assert torch.equal(target, expected_dir.get(name).float()), name
        assert (opened.parts(name) is None) == (not name.endswith("_proj.weight") or SKIPPED in name)
    assert opened.get("model.layers.0.mlp.up_proj.weight").dtype == torch.bfloat16
    assert {m: s.name for m in METHODS if (s := Scheme.of({"quantization_config": METHODS[m][1]}))}[method]


def test_compressed_tensors_stand_for_the_same_weights(quantised: tuple[str, Path, Path], tmp_path: Path) -> None:
    method, directory, plain = quantised
    found, config = files.compressed(method, load_file(directory / "model.safetensors"))
    other = files.write(tmp_path / "compressed", directory, found)
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    opened, theirs = ModelDir.open(other), ModelDir.open(plain)
    assert opened.check({name: theirs.shape(name) for name in theirs.names()}) == ()
    assert sorted(opened.names()) == sorted(theirs.names())
    for name in theirs.names():
        target = torch.empty(theirs.shape(name))
        opened.copy_into(name, target)
        torch.testing.assert_close(target, theirs.get(name).float(), rtol=2**-23, atol=0)
        assert opened.is_quantised(name) == (name.endswith("_proj.weight") and SKIPPED not in name)
    if method == "nvfp4":
        assert opened.scheme is not None
        assert opened.scheme.name in surogate_weight_format().adopts
        parts = opened.parts("model.layers.0.mlp.up_proj.weight")
        assert parts is not None
        room = torch.empty(opened.shape("model.layers.0.mlp.up_proj.weight"))
        four = built(surogate_weight_format())
        four.unpack(four.adopt(parts), room)
        wide = theirs.get("model.layers.0.mlp.up_proj.weight").float()
        torch.testing.assert_close(room, wide, rtol=2**-22, atol=0)


def test_the_configuration_may_be_in_modelopts_own_file(quantised: tuple[str, Path, Path], tmp_path: Path) -> None:
    method, directory, _ = quantised
    values = json.loads((directory / "config.json").read_text())
    own = values.pop("quantization_config")
    (directory / "config.json").write_text(json.dumps(values))
    left = {"quant_algo": own.get("quant_algo"), "exclude_modules": own.get("ignore")}
    (directory / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": left}))
    scheme = ModelDir.open(directory).scheme
    assert (scheme is not None) == (method == "nvfp4")
    if scheme is not None:
        assert scheme.skips(SKIPPED)
        assert not scheme.skips("model.layers.0.mlp.down_proj")


def test_a_pattern_that_is_no_regular_expression_is_named() -> None:
    with pytest.raises(UserError, match=r"quantization_config: '\(' is no regular expression"):
        Scheme.of({"quantization_config": {"quant_method": "compressed-tensors", "ignore": ["re:("]}})


@pytest.mark.slow_cases("mxfp4", "fp8")
def test_training_is_that_on_the_weights_they_stand_for(
    quantised: tuple[str, Path, Path], tmp_path: Path, base_on: Callable[[Path], list[str]], run_here: Run, history: Any
) -> None:
    """The codes stay as they are, because the checkpoint's blocks are the run's."""
    _, directory, plain = quantised
    outputs = [tmp_path / "a", tmp_path / "b"]
    for source, output in zip((directory, plain), outputs, strict=True):
        keys = [*LORA, f"qlora_block_size={files.BLOCK}", "merge_adapter=true"]
        assert run_here(output, *base_on(source), *keys) == 0
    assert history(outputs[0]) == history(outputs[1])
    notes = (outputs[0] / "metrics.jsonl").read_text()
    assert "kept as they are" in notes
    merged = load_file(outputs[0] / "model" / "model.safetensors")
    assert merged.keys() == load_file(outputs[1] / "model" / "model.safetensors").keys()
    assert "quantization_config" not in json.loads((outputs[0] / "model" / "config.json").read_text())
    # `surogate merge` folds the adapter into what the base stands for, in bf16.
    done = merge(str(directory), outputs[0], tmp_path / "merged")
    assert any("dequantised to bf16" in warning for warning in done.warnings)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    for name, value in load_file(tmp_path / "merged" / "model.safetensors").items():
        assert value.dtype == torch.bfloat16 or not name.endswith("_proj.weight") or SKIPPED in name
        torch.testing.assert_close(value.float(), merged[name].float(), rtol=2**-7, atol=1e-3)


def test_all_weights_are_not_trained_on_quantised_ones(
    quantised: tuple[str, Path, Path], tmp_path: Path, base_on: Callable[[Path], list[str]], run_here: Run
) -> None:
    _, directory, _ = quantised
    with pytest.raises(ConfigError, match=r"lora.*is false, and the weights of .* are quantised .*Fix: lora: true"):
        run_here(tmp_path / "out", *base_on(directory), "lora=false")


def test_a_missing_part_is_named(quantised: tuple[str, Path, Path]) -> None:
    method, directory, plain = quantised
    scale = {"fp8": ".weight_scale_inv", "nvfp4": ".weight_scale_2", "mxfp4": "_scales"}[method]
    module = "model.layers.0.self_attn.q_proj"
    tensors = load_file(directory / "model.safetensors")
    removed = tensors.pop(f"{module}{scale}")
    if method == "fp8":
        # Without it nothing tells that the weight is quantised but its dtype.
        tensors[f"{module}.weight_scale_inv"] = removed[:1].repeat(3, 1).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    names = ModelDir.open(plain).names()
    shapes = {name: ModelDir.open(plain).shape(name) for name in names}
    with pytest.raises(UserError) as caught:
        ModelDir.open(directory).check(shapes)
    assert f"{module}" in str(caught.value)
    assert ("is missing" in str(caught.value)) or method == "fp8"


def test_a_method_that_is_not_read_is_refused(
    hf_dir: Path, tmp_path: Path, base_on: Callable[[Path], list[str]], run_here: Run, installed: Registry
) -> None:
    assert Scheme.of({"quantization_config": {"quant_method": "gptq", "bits": 4}}) is None
    assert Scheme.of({"quantization_config": {"quant_method": "fp8"}}) is None
    assert Scheme.of({}) is None
    directory = tmp_path / "gptq"
    shutil.copytree(hf_dir, directory)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq"}}))
    assert run_here(tmp_path / "trained", *base_on(hf_dir), *LORA) == 0
    with pytest.raises(UserError, match="by a method that is not read here"):
        merge(str(directory), tmp_path / "trained", tmp_path / "merged")
