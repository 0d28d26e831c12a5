"""Runs of a family with parameters that are always in fp32, in bf16: training, exports, adapters, merging."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decaying import FP32
from safetensors.torch import load_file
from torch import Tensor

from surogate_core.cli.main import main
from surogate_core.plugins.registry import load_plugins

PLUGIN = """
from surogate_core import bundles, hookimpl
from surogate_testing import tiny
from decaying import Decaying

TINY = {**tiny.SMALL_CONFIG, "model_type": "decaying", "vocab_size": 1024, "architectures": ["Decaying"]}

@hookimpl
def surogate_model_family():
    return bundles.ModelFamily(name="decaying", hf_model_types=("decaying",), build=Decaying, presets={"tiny": TINY})
"""
BF16 = ("model_dtype=bf16", "learning_rate=0.01")


def exported(directory: Path) -> dict[str, Tensor]:
    """The tensors of an export, whose dtypes are those that they should have."""
    tensors = load_file(directory / "model.safetensors")
    wide = {name for name in tensors if name.endswith(FP32)}
    assert len(wide) == 4
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.float32} == wide
    return tensors


def test_they_are_in_fp32_from_the_first_file_to_the_last(
    tmp_path: Path,
    base: list[str],
    install_plugin: Callable[..., Path],
    run_here: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_plugin("acme-decaying", PLUGIN)
    found = load_plugins()
    scratch = [key for key in base if not key.startswith("model.config")]
    scratch += [*BF16, "model.name=decaying", "model.preset=tiny", "from_scratch=true", "lora=false"]
    monkeypatch.setattr("surogate_core.run.prepare.gemm_flops_per_second", lambda device, dtype: 1e9)
    run_here(tmp_path / "full", *scratch, "max_steps=2", registry=found)
    trained = exported(tmp_path / "full" / "model")
    assert any(not torch.equal(trained[name], trained[name].bfloat16().float()) for name in trained)

    lora = [
        *scratch,
        f"model={tmp_path / 'full' / 'model'}",
        "from_scratch=false",
        "lora=true",
        "lora_rank=2",
        "max_steps=2",
    ]
    lora = [key for key in lora if not key.startswith(("model.name", "model.preset"))]
    run_here(tmp_path / "lora", *lora, "merge_adapter=true", registry=found)
    assert main(["merge", str(tmp_path / "lora"), "--output", str(tmp_path / "merged")]) == 0
    for place in (tmp_path / "lora" / "model", tmp_path / "merged"):
        merged = exported(place)
        assert all(torch.equal(merged[name], trained[name]) for name in trained if name.endswith(FP32))
        assert not torch.equal(merged["layers.0.up_proj.weight"], trained["layers.0.up_proj.weight"])
