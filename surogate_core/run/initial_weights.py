"""Where the initial values of a run's tensors come from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.config.schema import RunConfig
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import EXPERT, expanded
from surogate_core.engine.assembly import Assembly
from surogate_core.engine.pieces import InFile, Kept, OneByOne, RandomSource, Source, pieces
from surogate_core.engine.weight_formats import plan_format
from surogate_core.hf.lora_files import fold
from surogate_core.run.assemble import ResolvedModel, adopts_checkpoint

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry


def weights_source(config: RunConfig, registry: Registry, resolved: ResolvedModel, assembly: Assembly) -> Source:
    """The source of the initial values: random numbers, or files with the adapter folded in."""
    device, dtype, weight_format = assembly.settings.device, assembly.settings.dtype, assembly.weight_format
    std = float(resolved.model.config.get("initializer_range") or 0.02)
    random = RandomSource(seed=config.train_seed, std=std, device=device)
    weights = resolved.weights
    if weights is None:
        return random
    given = resolved.adapter
    stack = given.folded if given else ()

    found = pieces(resolved.model, lora=assembly.lora, max_seqlen=assembly.settings.max_seqlen)
    packed = plan_format(found, weight_format, assembly.keeps_as_it_is)
    adopt = None
    if weight_format is not None and adopts_checkpoint(config, registry, resolved, weight_format):
        adopt = weight_format.adopt

    # One rank reads whole tensors, which is faster.
    in_parts = assembly.settings.ranks > 1 and assembly.settings.zero_level > 0

    def source(spec: TensorSpec) -> Tensor | Kept | InFile | OneByOne:
        adopts = adopt is not None and spec.hf_name in packed
        if spec.trainable and in_parts and _in_file(spec.hf_name):
            return InFile(partial(weights.read_part, spec.hf_name))
        if EXPERT not in spec.hf_name or (spec.role == "adapter" and not (given and given.start)):
            return one(spec, adopts=adopts)
        experts = [replace(spec, hf_name=n, shape=s) for n, s in expanded(spec.hf_name, spec.shape).items()]
        if spec.hf_name in packed:
            return OneByOne(lambda number: one(experts[number], adopts=adopts))
        whole = None
        for number, expert in enumerate(experts):
            value = one(expert)
            assert isinstance(value, Tensor)
            if whole is None:
                whole = value.new_empty(spec.shape)
            whole[number].copy_(value)
        assert whole is not None
        return whole

    def _in_file(name: str) -> bool:
        """Whether a tensor is in a file as it is used."""
        folds = any(adapter.adapts(name) for adapter in stack)
        return EXPERT not in name and not folds and not weights.is_quantised(name)

    def one(spec: TensorSpec, *, adopts: bool = False) -> Tensor | Kept:
        if spec.role == "adapter":
            return given.start.get(spec.hf_name) if given and given.start else random(spec)
        if given and given.start and given.start.replaces(spec.hf_name):
            return given.start.get(spec.hf_name)
        if spec.trainable:
            # Masters are wider than the run's dtype.
            return fold(spec.hf_name, weights.get(spec.hf_name), stack)
        folds = any(adapter.adapts(spec.hf_name) for adapter in stack)
        if adopts and not folds:
            parts = weights.parts(spec.hf_name)
            if parts is not None:
                assert adopt is not None
                return Kept(adopt({part: tensor.to(device) for part, tensor in parts.items()}))
        # Allocate the destination before the source. Otherwise the freed source leaves a hole in the host's memory.
        weight = torch.empty(spec.shape, dtype=dtype, device=device)
        if folds:
            return weight.copy_(fold(spec.hf_name, weights.get(spec.hf_name), stack))
        weights.copy_into(spec.hf_name, weight)
        return weight

    return source
