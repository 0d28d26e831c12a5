"""Declarations: parameters, linear slots, blocks and models.

A class body is the declaration; an instance is the class bound to a ``config.json`` mapping and,
while a block is being traced, to tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from surogate_core.dsl.dims import Dim, Number, Setting, number_of, size_of
from surogate_core.dsl.experts import BoundExperts, CodesOf, Experts, ExpertSlot, Fused, Grouped, PartsOf, fused_tensors
from surogate_core.dsl.heads import Head, ScoreHead
from surogate_core.dsl.mixers import Calls, KeyValues, Mixer, Spec, begin, declared_in
from surogate_core.dsl.rope import angles_of, covering, longest_covered, longest_fixed, scaled_config, switches
from surogate_core.dsl.sides import Given, Received, RelayedSpec, Side, SideSpec
from surogate_core.dsl.slots import Adapter, BoundJoin, BoundPanel, BoundSlot, Gemm, Join, LinearSlot, Panel
from surogate_core.dsl.tensors import Param as Param
from surogate_core.dsl.tensors import TensorSpec as TensorSpec
from surogate_core.dsl.tensors import adapter_specs, weight_spec
from surogate_core.errors import PluginError


class Linear:
    """A linear slot: weight [outputs, inputs] and, if `bias` is true, bias [outputs]."""

    def __init__(
        self, module: str, inputs: Dim | int, outputs: Dim | int, *, region: str, bias: bool | Setting = False
    ):
        self.module, self.inputs, self.outputs = module, inputs, outputs
        self.region, self.bias = region, bias

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else bound.slots[self.name]


GROUPS = ("all", "attention", "experts", "mlp")
"""Names of groups in `lora_target_modules`."""


def target_names(module: str, region: str, *, experts: bool) -> frozenset[str]:
    """The names by which `lora_target_modules` selects a slot: its own name, its group's, and ``all``.

    The groups are ``experts``, ``attention`` (the regions ``qkv`` and ``att``) and ``mlp`` (every other projection).
    """
    group = "experts" if experts else "attention" if region in ("qkv", "att") else "mlp"
    return frozenset({"all", group, module.rsplit(".", 1)[-1]})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """The linear slots that get an adapter, and its kind."""

    adapter: Adapter
    targets: frozenset[str]
    """Last parts of module names (``q_proj``), names of groups, or ``all``; see `target_names`."""
    expert_rank: int | None = None
    """Rank of the adapters of experts, which have the same scale; None: the rank of the other adapters."""
    train_router: bool = False
    """Whether routers are trained too, as whole matrices."""

    @classmethod
    def untrained(cls, dtype: torch.dtype = torch.float32) -> LoRA:
        """Adapters on no projection: nothing is trained."""
        return cls(adapter=Adapter(rank=1, scale=1.0, dropout=0.0, dtype=dtype), targets=frozenset())

    def of(self, module: str, region: str, *, experts: bool = False) -> Adapter | None:
        """The adapter of the slot with this module path, if it has one."""
        if not self.targets & target_names(module, region, experts=experts):
            return None
        if experts and self.expert_rank is not None:
            return replace(self.adapter, rank=self.expert_rank)
        return self.adapter


@dataclass(frozen=True, slots=True)
class Multiply:
    """How a recipe multiplies the slots of a block."""

    gemm: Gemm
    """The product of a linear slot."""
    grouped: Grouped | None = None
    """The product of experts, None for the plain one."""
    codes: CodesOf | None = None
    """How the product of experts reads packed weights, if it multiplies codes."""
    parts: PartsOf | None = None
    """Where the experts are in packed weights."""
    packed: frozenset[str] = frozenset()
    """Names of the slots whose weights the recipe has packed."""
    rows: Sequence[Tensor] = ()
    """The slots' rows of the recipe's state, empty if it has none."""


class Block:
    """Base of a family's blocks: class attributes declare, `forward` computes.

    `forward(self, x, tables)` maps x_ND to y_ND, both in the compute dtype, or to (y_ND, side outputs by name)
    if the class declares a `Side`. `tables` is what `Model.tables` returned. What looks at other positions is a mixer
    that the class declares (`surogate_core.dsl.mixers`); all the rest is computed position by position.
    """

    _params: ClassVar[tuple[Param, ...]] = ()
    _linears: ClassVar[tuple[Linear, ...]] = ()
    _sides: ClassVar[tuple[Side, ...]] = ()
    _experts: ClassVar[tuple[Experts, ...]] = ()
    _mixers: ClassVar[tuple[Mixer, ...]] = ()
    _given: ClassVar[tuple[Given, ...]] = ()
    _taken: ClassVar[tuple[Received, ...]] = ()
    reads_ids: ClassVar[bool] = False
    """Whether `forward` reads the rows' tokens, ``tables["input_ids"]`` [N] int64."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # By name: a declaration of a subclass takes the place of the one that it overrides.
        declared = {name: v for base in reversed(cls.__mro__) for name, v in vars(base).items()}.values()
        cls._params = tuple(v for v in declared if isinstance(v, Param))
        cls._linears = tuple(v for v in declared if isinstance(v, Linear))
        cls._sides = tuple(v for v in declared if isinstance(v, Side))
        cls._experts = tuple(v for v in declared if isinstance(v, Experts))
        cls._given = tuple(v for v in declared if isinstance(v, Given))
        cls._taken = tuple(v for v in declared if isinstance(v, Received))
        cls._mixers = declared_in(cls)

    def __init__(self, config: Mapping[str, Any], max_seqlen: int = 0):
        self.config = config
        self.max_seqlen = max_seqlen
        self.tensors: Mapping[str, Tensor] = {}
        self.slots: Mapping[str, BoundSlot] = {}
        self.experts: Mapping[str, BoundExperts] = {}
        self.taken: Mapping[str, Tensor] = {}
        """The values of earlier layers by name, for the next run of `outputs`."""
        self.given: dict[str, Tensor] = {}
        """The values for later layers by name, of the last run of `outputs`."""
        self._calls = Calls(self, None)
        self._specs: tuple[Spec, ...] | None = None

    @property
    def identity(self) -> tuple[type, str, int]:
        """What a block is made of, and so all that may tell two blocks apart: its class, its configuration and the
        bound of a document. Blocks of one identity share their programs.
        """
        return type(self), _canonical(self.config), self.max_seqlen

    def mixer_specs(self) -> tuple[Spec, ...]:
        """The mixers with their sizes, in the order of their declaration."""
        if self._specs is None:
            self._specs = tuple(mixer.spec(self.config) for mixer in self._mixers)
        return self._specs

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """The block's output, [N, D], and its side outputs where it declares any."""
        raise TypeError(f"{type(self).__name__} declares no forward")

    def outputs(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(y_ND, side outputs by name) of `forward`. Raises `TypeError` if they are not the declared ones, and
        `PluginError` if a mixer is not called once, or if y has another shape or dtype than x. The values for later
        layers are in `given`.
        """
        self._calls, tables = begin(self, tables)
        self.given = {}
        found = self.forward(x, tables)
        self._calls.finish()
        self._check_given(len(x))
        y, sides = found if isinstance(found, tuple) else (found, {})
        declared, kind = {side.name for side in self._sides}, type(self)
        if (y.shape, y.dtype) != (x.shape, x.dtype):
            raise PluginError(
                f"{kind.__module__}.{kind.__name__}: forward returns {list(y.shape)} in {y.dtype}, and gets "
                f"{list(x.shape)} in {x.dtype}. Fix: return what the next layer takes, such as y.to(x.dtype)."
            )
        if sides.keys() != declared:
            raise TypeError(
                f"{kind.__module__}.{kind.__name__}: forward returns the side outputs {sorted(sides)}, and the class "
                f"declares {sorted(declared)}. Fix: return (x, {{name: tensor}}) with the declared names."
            )
        return y, sides

    def _check_given(self, rows: int) -> None:
        found = {name: tuple(value.shape) for name, value in self.given.items()}
        declared = {spec.name: (rows, *spec.shape) for spec in self.given_specs()}
        if found != declared:
            kind = type(self)
            raise PluginError(
                f"{kind.__module__}.{kind.__name__}: forward gives later layers {found}, and the class declares "
                f"{declared}. Fix: call each Given once, with such a tensor."
            )

    def given_specs(self) -> tuple[RelayedSpec, ...]:
        """The values that it gives to later layers, in the order in which its program returns them."""
        given = (spec for one in self._given for spec in one.specs(self.config))
        lent = (
            one for spec in self.mixer_specs() if isinstance(spec, KeyValues) and spec.lends for one in spec.relayed
        )
        return (*given, *lent)

    def taken_specs(self) -> tuple[RelayedSpec, ...]:
        """The values that it takes of earlier layers, in the order in which its program takes them."""
        specs = (spec for spec in self.mixer_specs() if isinstance(spec, KeyValues) and spec.borrows)
        return (*(one.spec(self.config) for one in self._taken), *(one for spec in specs for one in spec.relayed))

    def side_specs(self) -> tuple[SideSpec, ...]:
        """The side outputs with their shapes, in the order of their declaration."""
        return tuple(side.spec(self.config) for side in self._sides)

    def linear_slots(self, lora: LoRA | None) -> tuple[LinearSlot, ...]:
        """The slots as planned for this run."""
        return tuple(
            LinearSlot(
                name=linear.name,
                module=linear.module,
                inputs=size_of(linear.inputs, self.config),
                outputs=size_of(linear.outputs, self.config),
                bias=linear.bias.value(self.config) if isinstance(linear.bias, Setting) else linear.bias,
                region=linear.region,
                adapter=lora.of(linear.module, linear.region) if lora else None,
                index=index,
            )
            for index, linear in enumerate(self._linears)
        )

    def expert_slots(self, lora: LoRA | None) -> tuple[ExpertSlot, ...]:
        """The slots of experts as planned for this run."""
        first = len(self._linears)
        return tuple(
            e.slot(
                self.config,
                adapter=lora.of(e.module, e.region, experts=True) if lora else None,
                index=first + number,
            )
            for number, e in enumerate(self._experts)
        )

    def tensor_specs(
        self,
        prefix: str,
        slots: tuple[LinearSlot, ...],
        *,
        train_base: bool,
        train_router: bool = False,
        experts: tuple[ExpertSlot, ...] = (),
    ) -> tuple[TensorSpec, ...]:
        """Every tensor of the block, in the order in which its program takes them.

        `train_router`: whether routers are trained although the base is not.
        """
        specs = [
            TensorSpec(
                name=p.name,
                hf_name=prefix + p.hf_name,
                shape=tuple(size_of(d, self.config) for d in p.dims),
                trainable=p.trained and (train_base or (train_router and p.role == "router")),
                role=p.role,
                init=p.init.value(self.config) if isinstance(p.init, Setting) else p.init,
                declared=p.declared,
                dtype=p.dtype,
            )
            for p in self._params
        ]
        for s in slots:
            module = prefix + s.module
            weight = weight_spec(s, module, (s.outputs, s.inputs), trainable=train_base)
            specs.append(weight)
            if s.bias:
                bias_name = f"{s.name}.bias"
                specs.append(
                    replace(
                        weight,
                        name=bias_name,
                        hf_name=f"{module}.bias",
                        shape=(s.outputs,),
                        role="bias",
                        init="zeros",
                    )
                )
            specs += adapter_specs(s, module)
        for e in experts:
            module = prefix + e.module
            specs += [weight_spec(e, module, (e.count, e.outputs, e.inputs), trainable=train_base)]
            specs += adapter_specs(e, module)
        return tuple(specs)

    def bind(
        self,
        tensors: Mapping[str, Tensor],
        slots: tuple[LinearSlot, ...],
        multiply: Multiply,
        *,
        experts: tuple[ExpertSlot, ...] | None = None,
        panels: Sequence[tuple[Panel | Join, Tensor]] = (),
        seed: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> Block:
        """The block with its tensors in place, so that `forward` can be traced.

        `experts`: without adapters unless given. Slots of a panel or a join take their weights from its tensor. `seed`
        and `masks`: as in `BoundSlot`.
        """
        packed, rows = multiply.packed, multiply.rows
        bound = type(self)(self.config, self.max_seqlen)
        bound._specs = self.mixer_specs()
        bound.tensors = tensors
        bound.experts = {
            e.name: BoundExperts(
                e,
                _of_slot(e.name, tensors),
                seed,
                multiply.grouped,
                packed=e.name in packed,
                codes=multiply.codes,
                parts=multiply.parts,
            )
            for e in (self.expert_slots(None) if experts is None else experts)
        }
        of_slot: dict[str, BoundPanel | BoundJoin] = {}
        for panel, tensor in panels:
            shared: BoundPanel | BoundJoin
            if isinstance(panel, Join):
                shared = BoundJoin(panel, tensor, [tensors[f"{s.name}.weight"] for s in panel.slots])
            else:
                adapters = [tensors[f"{s.name}.lora_{which}"] for s in panel.slots for which in "AB"]
                shared = BoundPanel(panel, tensor, adapters, masks)
                if not panel.shape.frozen:
                    shared.weights = [tensors[f"{s.name}.weight"] for s in panel.slots]
                    shared.rows = [rows[s.index] for s in panel.slots] if rows else ()
            of_slot |= dict.fromkeys((s.name for s in panel.slots), shared)
        bound.slots = {
            s.name: BoundSlot(
                slot=s,
                tensors=_of_slot(s.name, tensors),
                gemm=multiply.gemm,
                seed=seed,
                masks=masks,
                panel=of_slot.get(s.name),
                row=rows[number] if rows else None,
                packed=s.name in packed,
            )
            for number, s in enumerate(slots)
        }
        return bound

    def shared_inputs(
        self, slots: tuple[LinearSlot, ...], tensors: Mapping[str, Tensor], x: Tensor, tables: Mapping[str, Tensor]
    ) -> list[list[LinearSlot]]:
        """The slots grouped by the tensor that each is called with first, by running `forward` on fake tensors."""
        first: dict[str, Tensor] = {}

        def record(x_NI: Tensor, weight_OI: Tensor, slot: LinearSlot) -> Tensor:
            first.setdefault(slot.name, x_NI)
            return x_NI.new_empty(x_NI.shape[0], slot.outputs)

        plain = tuple(replace(s, adapter=None) for s in slots)
        bound = self.bind(tensors, plain, Multiply(record))
        bound.taken = {spec.name: x.new_empty(len(x), *spec.shape) for spec in self.taken_specs()}
        bound.outputs(x, tables)
        known = {s.name: s for s in slots}
        groups: dict[int, list[LinearSlot]] = {}
        for name, x_NI in first.items():
            groups.setdefault(id(x_NI), []).append(known[name])
        return [*groups.values()]


def _canonical(config: Mapping[str, Any]) -> str:
    """Equal for mappings of equal values."""
    return json.dumps(config, sort_keys=True, default=repr)


def _of_slot(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a slot by their names within it."""
    return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}


@dataclass(frozen=True, slots=True)
class Embedding:
    """The token embedding, weight [V, D]."""

    hf_name: str
    vocab: Dim
    width: Dim
    scale: Number = 1.0
    """Factor of the rows that the first layer reads; a tied head has the weight without it."""
    rounded: bool = False
    """Whether the factor is rounded to the weight's dtype first, as Gemma's is."""


@dataclass(frozen=True, slots=True)
class Stack:
    """`count` blocks of one kind; `prefix` holds ``{i}`` for the layer's number."""

    block: type[Block]
    count: Dim
    prefix: str


class Model:
    """Base of a family's model: ``embed``, ``layers`` and ``head`` declare it.

    `layers` is one `Stack` or a tuple of them.
    """

    architecture: ClassVar[str]
    """HF class name written into exported config.json files."""
    embed: ClassVar[Embedding]
    layers: ClassVar[Stack | tuple[Stack, ...]]
    head: Head
    """The head. In a class: the head of the family's language models; in an instance: the head that `config` names."""
    heads: ClassVar[tuple[type[Head], ...]] = (ScoreHead,)
    """Classes of heads that a model of the family may have instead."""
    unlike_transformers: ClassVar[Collection[str]] = ()
    """Keys of ``config.json`` with which transformers' class computes something else, for a reason that the family
    states. The conformance kit leaves them as the preset ``tiny`` has them.
    """
    carried: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that files have beside the model's, such as ``mtp.`` of layers that predict
    further tokens. No run computes with them; exports have them as the files do.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = dict(config)
        declared = type(self).head
        others = (cls for cls in self.heads if not isinstance(declared, cls))
        self.head = next((cls.beside(declared) for cls in others if cls.is_of(self.config)), declared)

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors that every block reads, from the positions [N] int32; e.g. RoPE's cos and sin."""
        return {}

    @property
    def positions(self) -> float:
        """Tokens of the longest document that the model knows; infinite if it has no end. A family whose positions end
        elsewhere than ``max_position_embeddings`` and RoPE's scaling say overrides it, and the five that follow.
        """
        return longest_covered(self.config)

    @property
    def fixed_positions(self) -> float:
        """Tokens of the longest document whose first angles do not depend on its length; mostly infinite."""
        return longest_fixed(self.config)

    @property
    def switches(self) -> frozenset[int]:
        """Lengths beyond which all angles of a document are others, and then stay (longrope): a text that grows beyond
        one of them goes through the layers anew. Mostly none.
        """
        return switches(self.config)

    def angles(self, length: int) -> Hashable:
        """A key of the angles of a document of `length` tokens: documents with equal keys have equal angles at equal
        positions.
        """
        return angles_of(self.config, length)

    def covering(self, length: int) -> dict[str, Any]:
        """The ``config.json`` of a model from scratch, with positions for documents of `length` tokens if that changes
        no angle.
        """
        return covering(self.config, length)

    def stretched(self, scaling: str | Mapping[str, Any] | None, positions: int | None) -> dict[str, Any]:
        """The ``config.json`` with the RoPE scaling and the number of positions that a run sets (`rope_scaling`,
        `max_model_len`). `UserError` for what the family lacks.
        """
        return scaled_config(self.config, scaling, positions)

    def complete_config(self) -> dict[str, Any]:
        """`config` with sizes and settings that it may leave out, for programs that have other defaults."""
        return self.config

    @property
    def hf_class(self) -> str:
        """The class of transformers that loads it."""
        return self.architecture if self.other_head is None else self.head.hf_class(self.architecture)

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's weight."""
        return self.head.tied is not None and bool(self.head.tied.value(self.config))

    @property
    def other_head(self) -> str | None:
        """Name of the weight of the family's own head, where this model has another one."""
        declared = type(self).head
        return None if self.head is declared else declared.hf_name

    def with_head(self, kind: str) -> dict[str, Any] | None:
        """The ``config.json`` of this model with a head of that kind; None where the family has none."""
        if kind == self.head.kind:
            return dict(self.config)
        found = next((cls for cls in self.heads if cls.kind == kind), None)
        return None if found is None else found.config(self.config, self.architecture)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.embed.vocab.size(self.config)

    @property
    def width(self) -> int:
        """Features D of the residual stream."""
        return self.embed.width.size(self.config)

    def logits(self, x_ND: Tensor, head: Mapping[str, Tensor]) -> Tensor:
        """[N, O] in the dtype of x: the outputs of the head, V logits of a language model. `head`: the tensors of
        `head_specs` by name. Traced with its backward.
        """
        return self.head.outputs(self, x_ND, head)

    def embed_scale(self, dtype: torch.dtype) -> float:
        """The factor of the embedding's rows, whose weight has this dtype."""
        scale = number_of(self.embed.scale, self.config, "the factor of the embedding")
        return torch.tensor(scale, dtype=dtype).item() if self.embed.rounded else scale

    def embedded(self, ids_N: Tensor, weight_VD: Tensor) -> Tensor:
        """[N, D] in the weight's dtype: what the first layer reads."""
        x_ND = torch.nn.functional.embedding(ids_N, weight_VD)
        scale = self.embed_scale(weight_VD.dtype)
        return x_ND if scale == 1 else x_ND.mul_(scale)

    def layer_config(self, number: int) -> Mapping[str, Any]:
        """The configuration of a layer's block, by default the model's own. A family whose layers of one class differ
        adds what they differ in, such as ``{**self.config, "window": 512}``. Layers of equal mappings share their
        programs, so the layer's number does not belong into it.
        """
        return self.config

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        """Every layer as (HF name prefix, block), in order; one block for all layers that are equal."""
        stacks = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        number = 0
        for stack in stacks:
            made: dict[str, Block] = {}
            for _ in range(stack.count.size(self.config)):
                config = self.layer_config(number)
                block = made.setdefault(_canonical(config), stack.block(config, max_seqlen))
                yield stack.prefix.format(i=number), block
                number += 1

    def source(self, number: int, name: str) -> tuple[int, str]:
        """(number of an earlier layer, what it calls the value) of what layer `number` takes under `name`. Numbers are
        those of `blocks`. Keys and values of an `Attention` are called ``attend.keys`` and ``attend.values``, with the
        name that its class gives it. A family whose layers take something overrides it.
        """
        kind = type(self)
        raise PluginError(
            f"{kind.__module__}.{kind.__name__}: layer {number} takes `{name}` of an earlier layer, and `source` does "
            f"not say of which. Fix: define source(self, number, name)."
        )

    def expert_slots(self) -> dict[str, tuple[ExpertSlot, ...]]:
        """Layer's prefix → the projections of its experts, without adapters; only layers that have experts."""
        found = {prefix: block.expert_slots(None) for prefix, block in self.blocks(0)}
        return {prefix: slots for prefix, slots in found.items() if slots}

    def expert_names(self) -> frozenset[str]:
        """The last names of the projections that adapters have for each expert."""
        slots = (slot for layer in self.expert_slots().values() for slot in layer)
        return frozenset(slot.module.rpartition(".")[2] for slot in slots if not slot.adapted)

    def fused_tensors(self) -> dict[str, Fused]:
        """Name → the tensors of experts that some files keep as one tensor."""
        by_layer = self.expert_slots().items()
        return {name: one for prefix, slots in by_layer for name, one in fused_tensors(prefix, slots).items()}

    def embed_specs(self, *, train_base: bool) -> tuple[TensorSpec, ...]:
        """The embedding's tensor."""
        return (
            TensorSpec(
                name="weight",
                hf_name=self.embed.hf_name,
                shape=(self.vocab_size, self.width),
                trainable=train_base,
                role="embedding",
                init="normal",
            ),
        )

    def head_specs(self, *, train_base: bool) -> tuple[TensorSpec, ...]:
        """The head's tensors: the norm and the weight, which may be the embedding's own."""
        return self.head.specs(self, train_base=train_base)
