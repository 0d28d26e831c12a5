"""The pieces of a model with their tensors, and where the tensors' initial values come from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from surogate_core.dsl.declare import Block, LoRA, Model, TensorSpec
from surogate_core.dsl.experts import EXPERT, ExpertSlot
from surogate_core.dsl.sides import LOADS, RelayedSpec, SideSpec
from surogate_core.dsl.slots import LinearSlot
from surogate_core.engine.schedule import EMBED, HEAD, layer_key
from surogate_core.errors import PluginError
from surogate_core.kernels.balancing.moved import FIGURES


@dataclass(frozen=True, slots=True)
class Kept:
    """A frozen weight in the form of its weight format."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class InFile:
    """A weight that is read in parts, so that a rank reads only what it keeps."""

    read: Callable[[int, Tensor], None]
    """(first element, flat tensor of any float dtype and device): reads as many elements into it."""


@dataclass(frozen=True, slots=True)
class OneByOne:
    """A frozen weight of experts that is read one expert at a time, so that it is never whole in full precision."""

    read: Callable[[int], Tensor | Kept]
    """The number of an expert → its weight."""


Relayed = MutableMapping[tuple[int, str], Tensor]
"""(number of a layer, name that it has there) → a value that the layer gives to later ones."""

Source = Callable[[TensorSpec], Tensor | Kept | InFile | OneByOne]
"""Returns the initial value of a tensor with its shape, in any float dtype, on any device; `InFile` only for a trained
one, on one of several ranks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """How a recipe or a weight format keeps a frozen weight."""

    pack: Callable[[Tensor], Tensor]
    """The weight in the model's dtype → its kept form."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    unpack: Callable[[Tensor, Tensor], None] | None = None
    """(kept form, workspace [O, I] in the model's dtype): writes the weight into the workspace. Programs receive the
    workspace, or the kept form if this is None.
    """
    rounded: bool = True
    """Whether the kept form differs from the weight in value."""
    expert: int | None = None
    """If `pack` takes the weight of one expert: the elements of its kept form, which begins a row of the whole."""

    @property
    def nbytes(self) -> int:
        """Bytes of the kept form."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the model that is compiled as one program: the embedding, a layer, or the head."""

    key: str
    specs: tuple[TensorSpec, ...]
    block: Block | None = None
    slots: tuple[LinearSlot, ...] = ()
    sides: tuple[SideSpec, ...] = ()
    experts: tuple[ExpertSlot, ...] = ()
    number: int = -1
    """The layer's number, from 0."""
    gives: tuple[RelayedSpec, ...] = ()
    """The values that it gives to later layers."""
    takes: tuple[RelayedSpec, ...] = ()
    """The values that it takes of earlier layers."""
    sources: tuple[tuple[int, str], ...] = ()
    """For each of them the number of that layer, and its name there."""

    def taken(self, relayed: Relayed) -> dict[str, Tensor]:
        """The values that the layer takes, by the names that it has for them."""
        return {spec.name: relayed[source] for spec, source in zip(self.takes, self.sources, strict=True)}

    def keep(self, relayed: Relayed, values: Sequence[Tensor]) -> None:
        """Keep the values that the layer gave, in the order of `gives`."""
        relayed.update({(self.number, spec.name): v for spec, v in zip(self.gives, values, strict=True)})

    @property
    def frozen_experts(self) -> tuple[TensorSpec, ...]:
        """The weights of its experts, if they are frozen."""
        names = {f"{slot.name}.weight" for slot in self.experts}
        return tuple(spec for spec in self.specs if spec.name in names and not spec.trainable)

    @property
    def places_of_experts(self) -> tuple[int, ...]:
        """The places of these weights among the piece's frozen tensors."""
        frozen = [spec for spec in self.specs if not spec.trainable]
        return tuple(place for place, spec in enumerate(frozen) if spec in self.frozen_experts)

    def spec(self, name: str) -> TensorSpec:
        """The tensor that the piece calls `name`."""
        return next(spec for spec in self.specs if spec.name == name)


def pieces(model: Model, *, lora: LoRA | None, max_seqlen: int) -> tuple[Piece, ...]:
    """All pieces in order. With LoRA the base is frozen, except routers if it trains them; otherwise all is trained."""
    train_base, train_router = lora is None, lora is not None and lora.train_router
    found = [Piece(key=EMBED, specs=model.embed_specs(train_base=train_base))]
    for index, (prefix, block) in enumerate(model.blocks(max_seqlen)):
        slots, experts = block.linear_slots(lora), block.expert_slots(lora)
        specs = block.tensor_specs(prefix, slots, train_base=train_base, train_router=train_router, experts=experts)
        takes = block.taken_specs()
        found.append(
            Piece(
                key=layer_key(index),
                specs=specs,
                block=block,
                slots=slots,
                sides=block.side_specs(),
                experts=experts,
                number=index,
                gives=block.given_specs(),
                takes=takes,
                sources=tuple(model.source(index, spec.name) for spec in takes),
            )
        )
    _check_relayed(found[1:])
    found.append(Piece(key=HEAD, specs=model.head_specs(train_base=train_base)))
    return tuple(found)


def of_one_rank(piece: Piece, ranks: int, *, balanced: bool = False) -> Piece:
    """The piece as each of several ranks has it that share out its experts evenly. `balanced`: whether it evens out
    their loads, and reports them.
    """

    def own(spec: TensorSpec) -> TensorSpec:
        if EXPERT not in spec.hf_name:
            return spec
        return replace(spec, shape=(spec.shape[0] // ranks, *spec.shape[1:]), parts=ranks, summed="expert_replicate")

    assert all(slot.count % ranks == 0 for slot in piece.experts), f"{ranks} ranks do not divide the experts"
    specs = tuple(map(own, piece.specs))
    experts = tuple(replace(slot, count=slot.count // ranks) for slot in piece.experts)
    loads = [SideSpec(LOADS, (FIGURES,), "rank_loads", 1.0)] if balanced and experts else []
    return replace(piece, specs=specs, experts=experts, sides=(*piece.sides, *loads))


def of_all(spec: TensorSpec) -> TensorSpec:
    """The tensor of all experts, of one that has a rank's."""
    return replace(spec, shape=(spec.shape[0] * spec.parts, *spec.shape[1:]), parts=1)


@dataclass(frozen=True, slots=True)
class ExpertsOfRank:
    """A source that gives the tensors of some experts, of one that gives those of all."""

    source: Source
    number: int
    """The number of the rank that has them, among those that share experts out."""

    def __call__(self, spec: TensorSpec) -> Tensor | Kept | InFile | OneByOne:
        """As a `Source`."""
        if spec.parts == 1:
            return self.source(spec)
        value, first = self.source(of_all(spec)), self.number * spec.shape[0]
        match value:
            case InFile(read=part):
                elements = first * math.prod(spec.shape[1:])
                return InFile(lambda at, into: part(elements + at, into))
            case OneByOne(read=one):
                return OneByOne(lambda number: one(first + number))
            case Kept(tensor=kept):
                raise AssertionError(f"{spec.hf_name}: {tuple(kept.shape)}, all experts in one")
        # Copied: a view would keep the experts of other ranks in memory.
        return value[first : first + spec.shape[0]].clone()


def _check_relayed(layers: Sequence[Piece]) -> None:
    """Refuse values that no earlier layer gives, or that none takes, which would have no gradient."""
    given: dict[tuple[int, str], tuple[int, ...]] = {}
    left = set[tuple[int, str]]()
    for piece in layers:
        for spec, source in zip(piece.takes, piece.sources, strict=True):
            if given.get(source) != spec.shape:
                known = f"gives rows of {given[source]}" if source in given else "gives none before it"
                raise PluginError(
                    f"{_class_of(piece)}: layer {piece.number} takes `{spec.name}` with rows of {spec.shape}, and "
                    f"`{source[1]}` of layer {source[0]} {known}. Fix: what `source` of the model returns"
                )
            left.discard(source)
        mine = {(piece.number, spec.name): spec.shape for spec in piece.gives}
        given |= mine
        left |= mine.keys()
    if left:
        number, name = min(left)
        raise PluginError(
            f"{_class_of(layers[number])}: layer {number} gives `{name}`, and no later layer takes it. Fix: another "
            f"class for a layer that gives nothing, or what `source` of the model returns"
        )


def _class_of(piece: Piece) -> str:
    kind = type(piece.block)
    return f"{kind.__module__}.{kind.__qualname__}"


def distinct(found: tuple[Piece, ...]) -> Iterator[TensorSpec]:
    """Every tensor once; a tied head shares the embedding's."""
    seen: set[str] = set()
    for piece in found:
        for spec in piece.specs:
            if spec.hf_name not in seen:
                seen.add(spec.hf_name)
                yield spec


class RandomSource:
    """Random initial values of each tensor from (seed, its name), so they do not depend on the order.

    Matrices are normal with standard deviation `std`; LoRA A is uniform in ±1/√inputs, as in PEFT. `PluginError` for a
    function whose values are not finite numbers of the parameter's shape.
    """

    def __init__(self, *, seed: int, std: float, device: torch.device):
        self.seed, self.std, self.device = seed, std, device

    def __call__(self, spec: TensorSpec) -> Tensor:
        # Generators differ between devices. Adapters are small enough to be drawn on the CPU, so a run on a trained
        # base starts from the same values on every device. Tensors whose values a function makes are small too.
        device = torch.device("cpu") if spec.role == "adapter" or callable(spec.init) else self.device
        value = torch.empty(spec.shape, dtype=torch.float32, device=device)
        if spec.init == "ones":
            return value.fill_(1)
        if spec.init == "zeros":
            return value.zero_()
        digest = hashlib.sha256(f"{self.seed}:{spec.hf_name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        if spec.init == "lora_a":
            bound = 1 / math.sqrt(spec.shape[-1])
            return value.uniform_(-bound, bound, generator=generator)
        if callable(spec.init):
            return _drawn_by(spec.init, value.uniform_(generator=generator), spec)
        return value.normal_(0, self.std, generator=generator)


def _drawn_by(function: Callable[[Tensor], Tensor], uniform: Tensor, spec: TensorSpec) -> Tensor:
    """The initial values that a family's function makes of uniform numbers, fp32."""
    who = f"{spec.declared or spec.hf_name}: the function of `init`"
    try:
        value = function(uniform)
    except Exception as error:
        raise PluginError(f"{who} failed: {type(error).__name__}: {error}") from error
    if not isinstance(value, Tensor) or value.shape != spec.shape:
        given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
        raise PluginError(f"{who} returns {given}. Fix: return a tensor of shape {spec.shape}, that of its argument.")
    value = value.float()
    if not bool(torch.isfinite(value).all()):
        raise PluginError(f"{who} returns NaN or infinity. Fix: return finite numbers for all of [0, 1).")
    return value
