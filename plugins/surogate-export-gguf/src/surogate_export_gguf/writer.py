"""Writes the file: figures, vocabulary, then one tensor after the other."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from surogate_core.plugin import UserError, atomic, bundles, significant
from surogate_export_gguf.architectures import Architecture, Tensor
from surogate_export_gguf.modelfile import modelfile
from surogate_export_gguf.options import GgufOptions
from surogate_export_gguf.vocabulary import Vocabulary

Type = gguf.GGMLQuantizationType
Data = NDArray[np.generic]

TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0}
FILE_TYPES = {
    Type.F32: gguf.LlamaFileType.ALL_F32,
    Type.F16: gguf.LlamaFileType.MOSTLY_F16,
    Type.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}
DTYPES = {torch.float32: Type.F32, torch.float16: Type.F16, torch.bfloat16: Type.BF16}
GROUP = 32
"""Weights with one scale in q8_0."""
CHUNK = 2**24
"""Elements that are quantised at a time."""
LARGEST_F16 = torch.finfo(torch.float16).max


def write(job: bundles.ExportJob, options: GgufOptions) -> bundles.Exported:
    """Write `job.file`; raises `UserError` for a model or a tokenizer that llama.cpp does not compute."""
    architecture = Architecture(job)
    vocabulary = Vocabulary.of(job, architecture.vocab_size)
    chosen = _type(job, options)
    types = {tensor.name: _type_of(tensor, chosen) for tensor in architecture.tensors}
    notes = [*architecture.family.notes, *vocabulary.notes]
    texts: dict[Path, str] = {}
    if options.ollama is not None:
        path = Path(options.ollama).expanduser()
        texts[path], own = modelfile(job, vocabulary, path)
        notes += own
    if uneven := [name for name, kind in types.items() if chosen is Type.Q8_0 and kind is Type.F16]:
        notes.append(f"{len(uneven)} matrices are f16: their rows are no multiples of {GROUP}, such as {uneven[0]}.")
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_type("model")
    writer.add_name(job.name)
    writer.add_file_type(FILE_TYPES[chosen])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    architecture.add_to(writer)
    vocabulary.add_to(writer)
    _add_sampling(job, writer)
    _write_tensors(job, architecture, types, writer)
    return bundles.Exported(notes=tuple(notes), texts=texts)


def _add_sampling(job: bundles.ExportJob, writer: gguf.GGUFWriter) -> None:
    """How tokens are chosen by default, if the model's files say so."""
    chosen = job.sampling
    if chosen.temperature == 0:
        return
    writer.add_int32("general.sampling.top_k", chosen.top_k)
    writer.add_float32("general.sampling.temp", chosen.temperature)
    writer.add_float32("general.sampling.top_p", chosen.top_p)
    writer.add_float32("general.sampling.min_p", chosen.min_p)
    writer.add_float32("general.sampling.penalty_repeat", chosen.repetition_penalty)


def _type(job: bundles.ExportJob, options: GgufOptions) -> gguf.GGMLQuantizationType:
    if options.type != "auto":
        return TYPES[options.type]
    sizes: dict[torch.dtype, int] = {}
    for name, dtype in job.dtypes.items():
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(job.shapes[name])
    return DTYPES.get(max(sizes, key=lambda dtype: sizes[dtype]), Type.F32)


def _type_of(tensor: Tensor, chosen: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    if not tensor.is_matrix:
        return Type.F32
    return Type.F16 if chosen is Type.Q8_0 and tensor.shape[-1] % GROUP else chosen


def _write_tensors(
    job: bundles.ExportJob,
    architecture: Architecture,
    types: dict[str, gguf.GGMLQuantizationType],
    writer: gguf.GGUFWriter,
) -> None:
    vectors = architecture.vectors()
    for name, values in vectors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    total = 0
    for tensor in architecture.tensors:
        kind = types[tensor.name]
        size = math.prod(gguf.quant_shape_to_byte_shape(tensor.shape, kind))
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
        total += size
    if total > atomic.free_bytes(job.file.parent):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise atomic.disk_error(full, what="--to", path=job.place, needed=total, fix="choose a place on another disk")
    try:
        writer.write_header_to_file(job.file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for values in vectors.values():
            writer.write_tensor_data(values)
        done = 0
        for tensor in architecture.tensors:
            data = _data(job, tensor, types[tensor.name], architecture)
            writer.write_tensor_data(data)
            done += data.nbytes
            job.progress(done, total)
    finally:
        writer.close()


def _data(job: bundles.ExportJob, tensor: Tensor, kind: gguf.GGMLQuantizationType, architecture: Architecture) -> Data:
    heads = architecture.heads_of(tensor.name)
    weights = ((name, tensor.of(architecture.converted(name, job.get(name)))) for name in tensor.parts)
    parts = [_converted(name, _ordered(weight, heads), kind) for name, weight in weights]
    return np.stack(parts) if len(tensor.shape) > len(job.shapes[tensor.parts[0]]) else parts[0]


def _ordered(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head with the two halves that RoPE turns together interleaved."""
    if not heads:
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def _converted(name: str, weight: torch.Tensor, kind: gguf.GGMLQuantizationType) -> Data:
    low, high = (extreme.item() for extreme in torch.aminmax(weight))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UserError(f"{name}: has values that are not finite. Fix: export a run that did not diverge.")
    if kind is Type.F16 and max(-low, high) > LARGEST_F16:
        raise UserError(
            f"{name}: has {significant(max(-low, high))}, and f16 ends at {LARGEST_F16:g}. "
            f"Fix: --type bf16 or --type q8_0"
        )
    weight = weight.contiguous()
    if kind is Type.F32:
        return weight.float().numpy()
    if kind is Type.F16:
        return weight.half().numpy()
    if kind is Type.BF16:
        return weight.bfloat16().view(torch.int16).numpy().view(np.uint8)
    return np.concatenate(list(_quantised(weight)))


def _quantised(weight: torch.Tensor) -> Iterator[NDArray[np.uint8]]:
    rows = max(1, CHUNK // weight.shape[-1])
    for first in range(0, len(weight), rows):
        yield gguf.quantize(weight[first : first + rows].float().numpy(), Type.Q8_0)
