"""Where the initial values of a run's tensors come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.config.schema import RunConfig
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import EXPERT, expanded
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import InFile, Kept, OneByOne, RandomSource, Source, pieces
from surogate_core.engine.planning.weight_formats import plan_format
from surogate_core.hf.lora_files import InitialAdapter, LoraAdapter, fold
from surogate_core.hf.weights import ModelDir
from surogate_core.setup.assemble import ResolvedModel, adopts_checkpoint
from surogate_core.setup.error_start import started_from_errors
from surogate_core.setup.heads import new_names

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry


def weights_source(config: RunConfig, registry: Registry, resolved: ResolvedModel, assembly: Assembly) -> Source:
    """The source of the initial values: random numbers, or files with the adapter folded in; and with `lora_init` the
    rounding errors of the weights.
    """
    source = _source(config, registry, resolved, assembly)
    has_start = resolved.adapter is not None and resolved.adapter.start is not None
    if config.lora_init == "default" or assembly.lora is None or has_start:
        return source
    return started_from_errors(source, assembly)


def _source(config: RunConfig, registry: Registry, resolved: ResolvedModel, assembly: Assembly) -> Source:
    settings, weight_format = assembly.settings, assembly.weight_format
    std = float(resolved.model.config.get("initializer_range") or 0.02)
    random = RandomSource(seed=config.train_seed, std=std, device=settings.device)
    if resolved.weights is None:
        return random
    adopt = None
    if weight_format is not None and adopts_checkpoint(config, registry, resolved, weight_format):
        adopt = weight_format.adopt
    found = pieces(resolved.model, lora=assembly.lora, max_seqlen=settings.max_seqlen)
    return _Files(
        weights=resolved.weights,
        new=new_names(resolved.model, resolved.weights),
        adapter=resolved.adapter,
        random=random,
        device=settings.device,
        dtype=settings.dtype,
        packed=plan_format(found, weight_format, assembly.keeps_as_it_is).keys(),
        adopt=adopt,
        in_parts=settings.axes.shards,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Values from the files of a model; a `Source`."""

    weights: ModelDir
    new: Collection[str]
    """Names of the head's tensors that the files lack."""
    adapter: InitialAdapter | None
    random: Source
    """The source of new adapters, and of a new head."""
    device: torch.device
    dtype: torch.dtype
    packed: Collection[str]
    """HF names of the weights that a weight format keeps."""
    adopt: Callable[[Mapping[str, Tensor]], Tensor] | None
    """`WeightFormat.adopt`, if the format keeps the tensors of these files unchanged."""
    in_parts: bool
    """Whether a rank reads only what it keeps of a trained weight. One rank reads whole tensors, which is faster."""

    def __call__(self, spec: TensorSpec) -> Tensor | Kept | InFile | OneByOne:
        adopts = spec.hf_name in self.packed
        if spec.trainable and self.in_parts and self._is_in_file(spec.hf_name):
            return InFile(partial(self.weights.read_part, spec.hf_name))
        if EXPERT not in spec.hf_name or (spec.role == "adapter" and self._start is None):
            return self._one(spec, adopts=adopts)
        experts = [replace(spec, hf_name=n, shape=s) for n, s in expanded(spec.hf_name, spec.shape).items()]
        if adopts:
            return OneByOne(lambda number: self._one(experts[number], adopts=True))
        whole = None
        for number, expert in enumerate(experts):
            value = self._one(expert)
            assert isinstance(value, Tensor)
            if whole is None:
                whole = value.new_empty(spec.shape)
            whole[number].copy_(value)
        assert whole is not None
        return whole

    @property
    def _start(self) -> LoraAdapter | None:
        return self.adapter.start if self.adapter is not None else None

    @property
    def _folded(self) -> tuple[LoraAdapter, ...]:
        return self.adapter.folded if self.adapter is not None else ()

    def _is_in_file(self, name: str) -> bool:
        """Whether a tensor is in a file as it is used."""
        folds = any(adapter.adapts(name) for adapter in self._folded)
        return name in self.weights.names() and EXPERT not in name and not folds and not self.weights.is_quantised(name)

    def _one(self, spec: TensorSpec, *, adopts: bool = False) -> Tensor | Kept:
        name, start, folded = spec.hf_name, self._start, self._folded
        new = name in self.new and not (start is not None and start.replaces(name))
        if new and (below := next((one for one in reversed(folded) if one.replaces(name)), None)) is not None:
            return below.get(name)  # the base has no head that it could be folded into
        if new or (spec.role == "adapter" and start is None):
            drawn = self.random(spec)
            assert isinstance(drawn, Tensor)
            return drawn
        if start is not None and (spec.role == "adapter" or start.replaces(name)):
            return start.get(name)
        if spec.trainable:
            # Masters are wider than the run's dtype.
            return fold(name, self.weights.get(name), folded)
        folds = any(adapter.adapts(name) for adapter in folded)
        parts = self.weights.parts(name) if adopts and self.adopt is not None and not folds else None
        if parts is not None and self.adopt is not None:
            return Kept(self.adopt({part: tensor.to(self.device) for part, tensor in parts.items()}))
        # Allocate the destination before the source. Otherwise the freed source leaves a hole in the host's memory.
        weight = torch.empty(spec.shape, dtype=spec.dtype_in(self.dtype), device=self.device)
        if folds:
            return weight.copy_(fold(name, self.weights.get(name), folded))
        self.weights.copy_into(name, weight)
        return weight
