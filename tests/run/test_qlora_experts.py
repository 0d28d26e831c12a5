"""Runs over quantised experts: in each format, from quantised checkpoints, resumed, merged, and what is noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import quantised
import torch
import transformers
from mixture import save_qwen3_moe
from run_fixtures import QUICK, RunHere
from safetensors.torch import load_file

from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import resolve_model

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "max_steps=2", "tokenizer=null")
FORMATS = pytest.mark.parametrize("key", ["qlora_bnb", "qlora_fp8", "qlora_fp4"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE whose second layer is dense."""
    return save_qwen3_moe(tmp_path_factory.mktemp("moe") / "base", hidden_size=64, dense_layers=[1])


@pytest.fixture(scope="module")
def small(data_cache: Path) -> list[str]:
    return [*QUICK, *LORA, f"data_cache_dir={data_cache}"]


@pytest.mark.slow
@FORMATS
def test_an_interrupted_run_continues_and_its_merged_model_is_the_trained_one(
    key: str, model: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path, history: Any
) -> None:
    keys = [*small, f"model={model}", f"{key}=true", "merge_adapter=true", "lr_scheduler_type=constant"]
    assert run_here(tmp_path / "whole", *keys) == 0
    assert run_here(tmp_path / "parts", *keys, "max_steps=1") == 0
    assert run_here(tmp_path / "parts", *keys) == 0
    steps = [[h for h in history(tmp_path / name) if h[0] == "step_end"] for name in ("whole", "parts")]
    assert len(steps[0]) == 2
    assert steps[0] == steps[1]
    merged, base = (load_file(d / "model.safetensors") for d in (tmp_path / "whole" / "model", model))
    assert merged.keys() == base.keys()
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    change = (merged[name] - base[name]).norm() / base[name].norm()
    assert 0.01 < change < 0.3, "the merged weight is the rounded one with the adapter"
    router = "model.layers.0.mlp.gate.weight"
    assert torch.equal(merged[router], base[router])
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["trainable", "merge"])
def test_training_goes_on_from_an_adapter_over_quantised_experts(
    mode: str, model: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path
) -> None:
    keys = [*small, f"model={model}", "qlora_bnb=true", "lora_target_modules=[all]", "qlora_offload_experts=true"]
    assert run_here(tmp_path / "first", *keys) == 0
    more = [f"adapter_path={tmp_path / 'first' / 'adapter'}", f"adapter_init_mode={mode}", "learning_rate=0"]
    assert run_here(tmp_path / "second", *keys, *more) == 0
    before, after = (load_file(tmp_path / d / "adapter" / "adapter_model.safetensors") for d in ("first", "second"))
    assert before.keys() == after.keys()
    name = "base_model.model.model.layers.0.mlp.experts.3.up_proj.lora_B.weight"
    assert before[name].any()
    assert torch.equal(before[name], after[name]) == (mode == "trainable")


@pytest.mark.slow_cases("mxfp4", "nvfp4", "fp8")
@pytest.mark.parametrize("method", quantised.METHODS)
def test_a_quantised_checkpoint_trains_like_the_weights_that_it_stands_for(
    method: str, model: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path,
    digests: Callable[[Path], dict[str, str]],
) -> None:  # fmt: skip
    made, wide = quantised.quantised(method, load_file(model / "model.safetensors"))
    assert len(made) > len(wide)
    outputs = [tmp_path / "codes-out", tmp_path / "wide-out"]
    directories = [
        quantised.write(tmp_path / "codes", model, made, method=method),
        quantised.write(tmp_path / "wide", model, wide),
    ]
    for directory, output in zip(directories, outputs, strict=True):
        assert run_here(output, *small, f"model={directory}", f"qlora_block_size={quantised.BLOCK}") == 0
    assert digests(outputs[0] / "adapter") == digests(outputs[1] / "adapter")
    notes = (outputs[0] / "metrics.jsonl").read_text()
    assert "they are kept as they are" in notes


@pytest.mark.slow
@pytest.mark.parametrize("method", quantised.METHODS)
def test_one_quantised_tensor_of_all_experts_trains_and_merges(
    method: str, model: Path, small: Sequence[str], run_here: RunHere, tmp_path: Path, installed: Registry,
    digests: Callable[[Path], dict[str, str]],
) -> None:  # fmt: skip
    config = load_run_config([*small, f"model={model}", "datasets=[x.jsonl]"], registry=installed)
    fused = resolve_model(config, installed).model.fused_tensors()
    made, wide = quantised.in_one(method, load_file(model / "model.safetensors"), fused)
    assert not any(".experts.3." in name for name in made)
    codes = quantised.write(tmp_path / "codes", model, made, method=method)
    plain = quantised.write(tmp_path / "wide", model, wide)
    keys = [*small, "lora_target_modules=[all]", f"qlora_block_size={quantised.BLOCK}"]
    for directory in (codes, plain):
        assert run_here(tmp_path / f"{directory.name}-out", *keys, f"model={directory}") == 0
    adapter = tmp_path / "codes-out" / "adapter"
    assert digests(adapter) == digests(tmp_path / "wide-out" / "adapter")
    for directory in (codes, plain):
        output = str(tmp_path / f"{directory.name}-merged")
        assert main(["merge", "--base-model", str(directory), str(adapter), "--output", output]) == 0
    merged, expected = (load_file(tmp_path / f"{d}-merged" / "model.safetensors") for d in ("codes", "wide"))
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name].float(), value.float(), rtol=2**-7, atol=1e-3)
