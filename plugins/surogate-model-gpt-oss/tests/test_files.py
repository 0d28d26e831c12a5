"""Files of the family: experts of all of a layer in one tensor, transposed in bf16 and as they are in MXFP4."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from surogate_model_gpt_oss.model import build
from surogate_model_gpt_oss.presets import PRESETS
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from surogate_core.plugin import CardFacts, ModelDir, TensorFile, export_adapter
from surogate_core.service.files import LoraAdapter, export_full, rejoined
from surogate_testing import tiny

CONFIG = {
    **PRESETS["tiny"],
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_local_experts": 3,
    "vocab_size": 61,
}
PREFIX = "model.layers.0.mlp.experts."


def exported(directory: Path, **settings: Any) -> tuple[Any, Path]:
    """An engine, and the model that it exports."""
    engine = tiny.engine(config=CONFIG, build=build, **settings)
    tensors, fused = engine.parameters.base_tensors(), engine.model.fused_tensors()
    card = CardFacts(title="t")
    made = export_full(
        directory, tensors, config=CONFIG, tokenizer=None, card=card, max_shard_bytes=40_000, fused=fused
    )
    return engine, made


def test_exports_have_the_names_of_the_published_files_and_are_read_back(tmp_path: Path) -> None:
    engine, directory = exported(tmp_path / "model")
    files = ModelDir.open(directory)
    assert files.shape(f"{PREFIX}gate_up_proj") == (3, 64, 64)
    assert files.shape(f"{PREFIX}down_proj") == (3, 32, 64)
    assert not [name for name in files.names() if ".experts.0." in name]
    apart = files.with_experts(engine.model.fused_tensors())
    for name, value in engine.parameters.base_tensors():
        assert torch.equal(apart.get(name), value), name
        into, part = torch.empty(value.shape, dtype=torch.float64), torch.empty(5)
        apart.copy_into(name, into)
        assert torch.equal(into, value.double())
        if value.numel() > 12:
            apart.read_part(name, 7, part)
            assert torch.equal(part, value.reshape(-1)[7:12])
    again = dict(rejoined(((name, apart.get(name)) for name in apart.names()), engine.model.fused_tensors()))
    assert {name: tuple(t.shape) for name, t in again.items()} == {n: tuple(files.shape(n)) for n in files.names()}
    assert all(torch.equal(files.get(name), tensor) for name, tensor in again.items())


def quantised(directory: Path) -> dict[str, Tensor]:
    """Makes a directory's experts MXFP4, as the published files are; returns their values by name, [E, in, out]."""
    generator = torch.Generator().manual_seed(0)
    tensors = {n: t for file in directory.glob("*.safetensors") for n, t in TensorFile(file).items()}
    expected = {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 126, (count, rows, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    for file in directory.glob("model*"):
        file.unlink()
    save_file(tensors, directory / "model.safetensors")
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (directory / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": method}))
    return expected


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    engine, directory = exported(tmp_path / "model")
    expected = quantised(directory)
    files = ModelDir.open(directory).with_experts(engine.model.fused_tensors())
    assert not files.check({name: value.shape for name, value in engine.parameters.base_tensors()})
    assert len(expected) == 4
    for name, value in expected.items():
        for number, one in enumerate(value):
            found = files.get(name.replace("experts.", f"experts.{number}.") + ".weight")
            assert torch.equal(found, one.t())


def test_an_adapter_of_experts_is_read_back(tmp_path: Path) -> None:
    engine = tiny.engine(config=CONFIG, build=build, lora=tiny.lora(rank=4, expert_rank=2, train_router=True))
    tensors, model = dict(engine.parameters.adapter_tensors()), engine.model
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(math.prod(tensor.shape))))
    directory = export_adapter(
        tmp_path / "adapter", tensors.items(), rank=4, alpha=8, dropout=0.0, base_model=None, card=CardFacts(title="t"),
        model=model,
    )  # fmt: skip
    names = TensorFile(directory / "adapter_model.safetensors").infos
    place = "base_model.model.model.layers.0.mlp.experts."
    assert names[f"{place}base_layer.lora_A.weight"].shape == (3 * 2, 64)
    assert names[f"{place}lora_B.weight"].shape == (64, 2 * 3)
    opened = LoraAdapter.open(directory).with_experts(model.fused_tensors())
    for name, tensor in tensors.items():
        assert torch.equal(opened.get(name), tensor), name
    assert opened.replaces("model.layers.1.mlp.router.bias")
    assert opened.adapts("model.layers.1.mlp.router.bias")
