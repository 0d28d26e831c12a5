"""Quantised checkpoints as other programs write them: fine-grained FP8, ModelOpt's NVFP4, MXFP4."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from surogate_core.dsl.experts import Fused
from surogate_core.formats import fp4

SKIPPED = "model.layers.1.mlp.down_proj"
BLOCK = 32


def fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = -(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)
    wide = torch.nn.functional.pad(weight, (0, columns * BLOCK - weight.shape[1], 0, rows * BLOCK - weight.shape[0]))
    tiles = wide.view(rows, BLOCK, columns, BLOCK)
    scales = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(wide.shape)
    return {f"{name}.weight": codes[: weight.shape[0], : weight.shape[1]], f"{name}.weight_scale_inv": scales}


def nvfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    decode = weight.abs().amax() / (448 * 6)
    tiles = weight.view(weight.shape[0], -1, 16)
    scales = (tiles.abs().amax(-1) / 6 / decode).to(torch.float8_e4m3fn)
    codes = fp4.encode(tiles / (scales.float() * decode)[..., None]).flatten(1)
    extra = {f"{name}.input_scale": torch.ones(())}
    return {
        f"{name}.weight": fp4.pairs(codes),
        f"{name}.weight_scale": scales,
        f"{name}.weight_scale_2": decode,
    } | extra


def mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    tiles = weight.view(weight.shape[0], -1, 32)
    exponents = torch.frexp(tiles.abs().amax(-1))[1] - 3
    codes = fp4.encode(tiles / 2.0 ** exponents[..., None]).flatten(1)
    blocks = fp4.pairs(codes).view(weight.shape[0], -1, 16)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}


METHODS: dict[str, tuple[Callable[[str, Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "fp8": (
        fp8,
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head", SKIPPED]},
    ),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", f"{SKIPPED}*"]}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["layers.1.mlp.down_proj", "lm_head"]}),
}


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors that leaves the same modules as they are."""
    skipped = ["lm_head", f"re:.*{SKIPPED.removeprefix('model.')}$"]
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "float", **weights}}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": skipped}


def compressed(method: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantised tensors as compressed-tensors stores them, and its ``quantization_config``."""
    if method == "fp8":
        found = {name.replace(".weight_scale_inv", ".weight_scale"): tensor for name, tensor in tensors.items()}
        blocks = {"num_bits": 8, "strategy": "block", "block_structure": [BLOCK, BLOCK]}
        return found, _compressed("float-quantized", **blocks)
    found = {}
    for name, tensor in tensors.items():
        module, _, ending = name.rpartition(".")
        if tensor.dtype == torch.uint8 and ending == "weight":
            found[f"{module}.weight_packed"] = tensor
        elif ending == "weight_scale_2":
            found[f"{module}.weight_global_scale"] = 1 / tensor.reshape(1)
        elif name.endswith("_blocks"):
            found[f"{name.removesuffix('_blocks')}.weight_packed"] = tensor.flatten(1)
        elif name.endswith("_scales"):
            found[f"{name.removesuffix('_scales')}.weight_scale"] = tensor
        else:
            found[name.replace("input_scale", "input_global_scale")] = tensor
    return found, _compressed(f"{method}-pack-quantized", num_bits=4)


def expected(method: str, tensors: dict[str, Tensor], module: str) -> Tensor:
    """The weight [O, I] fp32 by the method's definition, element by element where that is short."""
    if method == "fp8":
        scales = tensors[f"{module}.weight_scale_inv"]
        codes = tensors[f"{module}.weight"].float()
        rows, columns = torch.arange(codes.shape[0]) // BLOCK, torch.arange(codes.shape[1]) // BLOCK
        return codes * scales[rows][:, columns]
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat((sizes, -sizes))
    packed = tensors[f"{module}.weight" if method == "nvfp4" else f"{module}_blocks"].flatten(1).long()
    values = torch.stack((table[packed % 16], table[packed // 16]), dim=-1).flatten(1)
    if method == "nvfp4":
        scales = tensors[f"{module}.weight_scale"].float()
        return values * scales.repeat_interleave(16, 1) * tensors[f"{module}.weight_scale_2"]
    return values * (2.0 ** (tensors[f"{module}_scales"].float() - 127)).repeat_interleave(32, 1)


def quantised(method: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the tensors with every projection but one quantised, what they stand for in fp32)."""
    made: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and module != SKIPPED:
            found = METHODS[method][0](module, value.float())
            made |= found
            wide[name] = expected(method, found, module)
        else:
            made[name] = wide[name] = value
    return made, wide


def in_one(
    method: str, tensors: Mapping[str, Tensor], fused: Mapping[str, Fused]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`quantised` with one tensor for all experts of a layer, in which an expert's projections are one matrix."""
    apart = {part for one in fused.values() for part, _ in one.parts}
    made, wide = quantised(method, {name: value for name, value in tensors.items() if name not in apart})
    for whole, one in fused.items():
        each = len(one.parts) // one.shape[0]
        experts = [one.parts[first : first + each] for first in range(0, len(one.parts), each)]
        found = [METHODS[method][0]("", torch.cat([tensors[part].float() for part, _ in e])) for e in experts]
        for ending in found[0]:
            name = whole + ending.replace(".weight", "").replace(".", "_")
            made[name] = torch.stack([parts[ending] for parts in found])
        for expert, parts in zip(experts, found, strict=True):
            rows = expected(method, parts, "").split([outputs for _, (outputs, _) in expert])
            wide |= {part: value for (part, _), value in zip(expert, rows, strict=True)}
    return made, wide


def write(directory: Path, like: Path, tensors: Mapping[str, Tensor], *, method: str | None = None) -> Path:
    """A directory with the configuration and the tokenizer of another and these tensors."""
    shutil.copytree(like, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    if method is not None:
        values = json.loads((directory / "config.json").read_text())
        values["quantization_config"] = METHODS[method][1]
        (directory / "config.json").write_text(json.dumps(values))
    return directory
