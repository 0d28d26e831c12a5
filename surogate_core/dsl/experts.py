"""Projections that every expert of a mixture has: one slot with an axis of experts.

Shape suffixes: N tokens, E experts, K experts of a token, R = N·K rows sorted by expert, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl.dims import Dim
from surogate_core.dsl.slots import Adapter
from surogate_core.kernels import experts as ops
from surogate_core.kernels.balancing.moved import Parts
from surogate_core.kernels.expert_ranks import (
    ExpertExchange,
    ExpertRanks,
    ReceivedRows,
    SumsExchange,
    SumsTrip,
    TokensTrip,
    biased,
    exchange_of,
    taken,
)
from surogate_core.kernels.linked import active
from surogate_core.kernels.ops import region, swiglu

SALTS = 2**16
"""Dropout masks of a part of the rows have salts from this multiple on: more than a block has slots."""
HALVES = 2
"""Parts of the tokens, of which one is exchanged while the experts compute the other."""
EXPERT = "{e}"
"""The place of an expert's number in a name. A tensor of such a name has a first axis of experts."""


def expanded(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Name → shape of the tensors in a file that one tensor of the model is made of."""
    if EXPERT not in name:
        return {name: tuple(shape)}
    return {name.replace(EXPERT, str(e)): tuple(shape[1:]) for e in range(shape[0])}


def split(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors in a file that one tensor of the model is written as."""
    if EXPERT not in name:
        return [(name, value)]
    return [(name.replace(EXPERT, str(e)), part) for e, part in enumerate(value.unbind())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A tensor that some programs write instead of the experts' own: [E, rows of all its projections, I]."""

    shape: tuple[int, int, int]
    parts: tuple[tuple[str, tuple[int, int]], ...]
    """(name, shape) of the tensors that it holds, in the order of their data."""
    always: bool = False
    """Whether all files of the model have this tensor, so that exports and adapters do too."""
    transposed: bool = False
    """Whether files have it as [E, I, rows]; quantised ones have it as any other."""
    adapted: bool = False
    """Whether an adapter is of this tensor, whatever tensors files have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSlot:
    """One projection of all experts of a block, as planned for a run."""

    name: str
    """Attribute name in the block."""
    module: str
    """HF module path relative to the block, with `EXPERT` in the place of the number."""
    count: int
    """E, the number of experts."""
    choices: int
    """K, experts of a token."""
    inputs: int
    outputs: int
    region: str
    """Recompute switch that covers its output."""
    fused: str | None
    """Name, relative to the block, of the tensor that holds this weight of all experts in some files."""
    always: bool = False
    transposed: bool = False
    adapted: bool = False
    """These three as of `Fused`."""
    adapter: Adapter | None
    index: int
    """Separates the dropout masks of the block's slots."""

    @property
    def unused(self) -> int:
        """Parameters of the experts that a token does not go to."""
        return self.inputs * self.outputs * (self.count - self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedExperts(ExpertSlot):
    """A slot with everything that a recipe may read besides the operands."""

    seed: Tensor | None = None
    """0-d int32, different in every micro-step and layer; None outside training."""
    packed: bool = False
    """Whether the weight is a frozen weight that the recipe's `pack_experts` converted."""

    @classmethod
    def of(cls, slot: ExpertSlot, *, seed: Tensor | None, packed: bool) -> TracedExperts:
        """The slot with these."""
        return cls(**{f.name: getattr(slot, f.name) for f in fields(ExpertSlot)}, seed=seed, packed=packed)


Grouped = Callable[[Tensor, Sequence[Tensor], Tensor, Sequence[TracedExperts]], Sequence[Tensor]]
"""(x_RI, weights_EOI of each slot, ends_E, slots) → y_RO of each, like `Recipe.grouped`."""
CodesOf = Callable[[Tensor, ExpertSlot], tuple[ops.Codes, ops.Codes]]
"""(packed weights, slot) → the codes of W and of Wᵀ, like `Recipe.expert_codes`."""
PartsOf = Callable[[ExpertSlot], Parts]
"""The parts of packed weights, like `Recipe.expert_parts`."""


def fused_tensors(prefix: str, slots: Sequence[ExpertSlot]) -> dict[str, Fused]:
    """Name → the tensors that a block's experts have in files that keep all experts of a layer in one tensor."""
    groups: dict[str, list[ExpertSlot]] = {}
    for slot in slots:
        if slot.fused is not None:
            groups.setdefault(prefix + slot.fused, []).append(slot)
    return {
        name: Fused(
            shape=(group[0].count, sum(slot.outputs for slot in group), group[0].inputs),
            always=group[0].always,
            transposed=group[0].transposed,
            adapted=group[0].adapted,
            parts=tuple(
                (f"{prefix}{slot.module}.weight".replace(EXPERT, str(e)), (slot.outputs, slot.inputs))
                for e in range(group[0].count)
                for slot in group
            ),
        )
        for name, group in groups.items()
    }


class Experts:
    """A projection of all experts: weight [count, outputs, inputs]; `module` has ``{e}`` for the number.

    `fused`: the name under which some files have this weight of all experts as one tensor [count, rows, inputs].
    Projections with the same name follow each other in its rows, in the order of their declaration. `always`: all files
    have this tensor, and so do exports; it has one projection. `transposed`: they have it as [count, inputs, rows].
    `adapted`: adapters that other programs read are of this tensor, though files have tensors of each expert.
    """

    def __init__(
        self,
        module: str,
        count: Dim,
        choices: Dim,
        inputs: Dim,
        outputs: Dim,
        *,
        region: str,
        fused: str | None = None,
        always: bool = False,
        transposed: bool = False,
        adapted: bool = False,
    ):
        assert EXPERT in module
        assert fused or not (always or transposed or adapted)
        self.always, self.transposed, self.adapted = always, transposed, adapted or always
        self.module, self.count, self.choices = module, count, choices
        self.inputs, self.outputs, self.region, self.fused = inputs, outputs, region, fused

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else bound.experts[self.name]

    def slot(self, config: Mapping[str, Any], *, adapter: Adapter | None, index: int) -> ExpertSlot:
        """The slot for a configuration."""
        return ExpertSlot(
            name=self.name,
            module=self.module,
            count=self.count.size(config),
            choices=self.choices.size(config),
            inputs=self.inputs.size(config),
            outputs=self.outputs.size(config),
            region=self.region,
            fused=self.fused,
            always=self.always,
            transposed=self.transposed,
            adapted=self.adapted,
            adapter=adapter,
            index=index,
        )


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token; see `kernels.experts.route`."""

    weights_NK: Tensor
    experts_NK: Tensor
    order_R: Tensor
    slot_NK: Tensor
    ends_E: Tensor
    exchange: ExpertExchange | None = None
    """The places of the rows at the ranks that share out the experts; None where each rank has all of them."""

    @classmethod
    def of(cls, logits_NE: Tensor, choices: int, *, renormalise: bool, **extensions: Any) -> Routes:
        """The `choices` most probable experts of each token; `renormalise`: their weights sum to 1.

        `extensions`: those of the op `route`, such as `sigmoid`.
        """
        routes, ranks = cls(*ops.route(logits_NE, choices, renormalise, **extensions)), active(ExpertRanks)
        if ranks is None:
            return routes
        way = exchange_of(routes.experts_NK, routes.order_R, routes.slot_NK, routes.ends_E, ranks)
        return replace(routes, exchange=way)

    def scaled(self, scale_E: Tensor) -> Routes:
        """Routes whose weights are multiplied by a factor of each expert."""
        return replace(self, weights_NK=ops.expert_scale(self.weights_NK, scale_E, self.experts_NK))

    def swiglu(self, gate_RI: Tensor, up_RI: Tensor) -> Tensor:
        """[R, I]: silu(gate) · up of the sorted rows."""
        ends = [] if self.exchange is None else self.exchange.ends
        # Rows that are multiplied apart have several last ends.
        return swiglu(gate_RI, up_RI, ends_E=ends[0] if len(ends) == 1 else None)

    def biased(self, y_RO: Tensor, bias_EO: Tensor) -> Tensor:
        """[R, O]: rows with the bias of their experts."""
        if self.exchange is not None:
            return biased(y_RO, bias_EO, self.exchange)
        return ops.expert_bias(y_RO, bias_EO, self.ends_E)

    def combined_bias(self, bias_EO: Tensor) -> Tensor:
        """[N, O] fp32: the weighted sum of the biases of each token's experts."""
        shares_NE = self.weights_NK.new_zeros(len(self.weights_NK), len(bias_EO))
        return shares_NE.scatter(1, self.experts_NK.long(), self.weights_NK) @ bias_EO.to(self.weights_NK.dtype)

    def combine(self, y_RO: Tensor) -> Tensor:
        """[N, O]: the weighted sum of each token's rows."""
        if self.exchange is not None:
            return self.exchange.combined(y_RO, self.weights_NK)
        return ops.combine(y_RO, self.order_R, self.slot_NK, self.weights_NK)


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """A slot with its tensors inside a block's forward."""

    slot: ExpertSlot
    tensors: Mapping[str, Tensor]
    seed: Tensor | None
    grouped: Grouped | None = None
    """The recipe's product; None for the plain one."""
    packed: bool = False
    """Whether the weight is a frozen weight that the recipe packed."""
    codes: CodesOf | None = None
    """The recipe's `expert_codes`."""
    parts: PartsOf | None = None
    """The recipe's `expert_parts`."""

    def tensor_list(self, *, adapters: torch.dtype | None = None) -> list[Tensor]:
        """Weights, and A and B where there is an adapter, in the dtype `adapters` if it is given."""
        if self.slot.adapter is None:
            return [self.tensors["weight"]]
        pair = self.tensors["lora_A"], self.tensors["lora_B"]
        return [self.tensors["weight"], *(pair if adapters is None else (t.to(adapters) for t in pair))]

    def adapter(self) -> ops.ExpertAdapter | None:
        """The adapter as the op takes it."""
        adapter = self.slot.adapter
        if adapter is None:
            return None
        return ops.ExpertAdapter(rank=adapter.rank, scale=adapter.scale, dropout=adapter.dropout, salt=self.slot.index)

    def traced(self) -> TracedExperts:
        """The slot as the recipe takes it."""
        return TracedExperts.of(self.slot, seed=self.seed, packed=self.packed)


def _product(slots: Sequence[BoundExperts]) -> ops.GroupedProduct | None:
    """The recipe's product as the op takes it."""
    grouped = slots[0].grouped
    if grouped is None:
        return None
    traced, codes = [slot.traced() for slot in slots], slots[0].codes

    def product(x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor) -> Sequence[Tensor]:
        return grouped(x_RI, weights, ends_E, traced)

    if codes is None or not all(slot.packed for slot in slots):
        return product
    return ops.CodedProduct(product, lambda weights: list(map(codes, weights, traced)))


def project(x: Tensor, routes: Routes, *slots: BoundExperts, gathered: bool = False) -> Sequence[Tensor]:
    """[R, O] of each slot. `x`: the tokens [N, I], or with `gathered` the sorted rows [R, I].

    Where ranks share out experts, R are the rows that other ranks sent to the experts of this one.
    """
    with region(slots[0].slot.region):
        if routes.exchange is not None:
            received = ReceivedRows(x) if gathered else routes.exchange.sent(x)
            return _multiplied(received, routes.exchange, _Operands.of(slots, routes.exchange, x.dtype))
        return ops.grouped_linears(
            x,
            None if gathered else routes.order_R,
            None if gathered else routes.slot_NK,
            routes.ends_E,
            slots[0].seed,
            [slot.adapter() for slot in slots],
            _product(slots),
            *(tensor for slot in slots for tensor in slot.tensor_list()),
        )


def _multiplied(received: ReceivedRows, way: ExpertExchange, given: _Operands, first: int = 0) -> list[Tensor]:
    """[S, O] of each slot: the products of rows that all ranks sent. `first`: number of the first part of the rows."""
    slots, ends = given.slots, way.ends
    seed = slots[0].seed
    if whole := _sees_all(slots[0]):
        received = received.rows()
    found: list[Sequence[Tensor]] = []
    for part, (x, ends_G) in enumerate(zip(received.x.chunk(len(ends)), ends, strict=True), first):
        adapters, taken_P1 = [_of_part(slot.adapter(), part) for slot in slots], taken(x, ends_G)
        if whole:
            x = torch.where(taken_P1, x, 0.0)
            ends_G = torch.cat((ends_G[:-1], ends_G.new_full((1,), len(x))))
        where = received.order_S, received.place_MK
        named: Any = {"parts": received.order_S is not None, "others": given.others}
        outputs = ops.grouped_linears(x, *where, ends_G, seed, adapters, _product(slots), *given.tensors, **named)
        found.append([torch.where(taken_P1, y_PO, 0.0) for y_PO in outputs] if whole else outputs)
    return list(found[0]) if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]


def _sees_all(slot: BoundExperts) -> bool:
    """Whether the product must see every row as an expert's, and zeros in places that no row takes: its scales are not
    of rows.
    """
    return slot.grouped is not None and slot.codes is None


@dataclass(frozen=True, slots=True)
class _Operands:
    """The slots of all experts whose rows this rank computes, and their tensors as the ops take them."""

    slots: Sequence[BoundExperts]
    tensors: Sequence[Tensor]
    others: Sequence[Tensor] = ()

    @classmethod
    def of(cls, slots: Sequence[BoundExperts], way: ExpertExchange, dtype: torch.dtype) -> _Operands:
        """Those of the rank's own experts and, where loads are evened out, those that other ranks gave."""
        if way.moved is None:
            return cls(slots, [tensor for slot in slots for tensor in slot.tensor_list()])
        count = len(way.ends[0])
        # Adapters as the op takes them: half as many bytes to send.
        own = [slot.tensor_list(adapters=dtype) for slot in slots]
        # The weights of other experts stay apart from this rank's, which are many, where no slot needs them in one.
        alone = not any(slot.packed or weight.requires_grad for slot, (weight, *_) in zip(slots, own, strict=True))
        sent = [t for slot, ts in zip(slots, own, strict=True) for t in ts[slot.packed :]]
        weights = [alone and t is ts[0] for slot, ts in zip(slots, own, strict=True) for t in ts[slot.packed :]]
        found, others = iter(way.moved.with_others(sent, weights)), list[Tensor]()
        tensors: list[Tensor] = []
        for slot, (weight, *adapter) in zip(slots, own, strict=True):
            if slot.packed:
                assert slot.parts is not None, f"{slot.slot.name}: its experts are packed in one"
                parts = slot.parts(slot.slot), slot.parts(replace(slot.slot, count=count))
                tensors.append(way.moved.packed_with_others(weight, *parts))
            elif alone:
                others.append(next(found))
                tensors.append(weight)
            else:
                tensors.append(next(found))
            tensors += [next(found) for _ in adapter]
        return cls([replace(one, slot=replace(one.slot, count=count)) for one in slots], tensors, tuple(others))


def _of_part(adapter: ops.ExpertAdapter | None, part: int) -> ops.ExpertAdapter | None:
    """The adapter with dropout masks of their own for a part of the rows."""
    return None if adapter is None else replace(adapter, salt=adapter.salt + SALTS * part)


def project_combined(x_RI: Tensor, routes: Routes, slot: BoundExperts) -> Tensor:
    """[N, O]: the slot's projection of the sorted rows. The rows of a token are added, weighted by their routes."""
    with region(slot.slot.region):
        way = routes.exchange
        if isinstance(way, SumsExchange) and not _sees_all(slot):
            given = _Operands.of([slot], way, x_RI.dtype)
            return way.summed(routes.weights_NK, x_RI.dtype, lambda weights_MK: _sums(x_RI, way, given, weights_MK))
        if way is not None:
            (y_SO,) = _multiplied(ReceivedRows(x_RI), way, _Operands.of([slot], way, x_RI.dtype))
            return way.combined(y_SO, routes.weights_NK)
        return ops.combined_linear(
            x_RI,
            routes.order_R,
            routes.slot_NK,
            routes.ends_E,
            routes.weights_NK,
            slot.seed,
            slot.adapter(),
            _product([slot]),
            *slot.tensor_list(),
        )


def _sums(x_SI: Tensor, way: SumsExchange, given: _Operands, weights_MK: Tensor) -> Tensor:
    """[C·N, O] fp32: this rank's part of `project_combined` for the tokens of all ranks."""
    (slot,) = given.slots
    where = way.order_S, way.place_MK, way.ends_G, weights_MK
    rest = slot.seed, _of_part(slot.adapter(), way.part), _product([slot])
    return ops.combined_linear(x_SI, *where, *rest, *given.tensors, parts=True, others=given.others)


Between = Callable[..., Tensor]
"""(routes, the sorted rows of each of the first projections [R, O]) → the sorted rows [R, I] that the last one takes.
Each row depends on the same row of the others alone.
"""


def mixture(
    x_NI: Tensor, routes: Routes, first: Sequence[BoundExperts], between: Between, last: BoundExperts
) -> Tensor:
    """[N, O]: all of a mixture of experts behind its router: `project`, `between`, `project_combined`.

    Where ranks share out experts, the tokens of one half travel while the experts compute the other.
    """
    way = routes.exchange
    frozen = not any(slot.tensors["weight"].requires_grad for slot in (*first, last))
    # The gradients of weights would be written twice.
    parts = way.parts(HALVES) if isinstance(way, SumsExchange) and frozen else []
    if not parts or any(map(_sees_all, (*first, last))):
        return project_combined(between(routes, *project(x_NI, routes, *first)), routes, last)
    return _halves(x_NI, routes, parts, first, between, last)


def _halves(
    x_NI: Tensor,
    routes: Routes,
    parts: Sequence[SumsExchange],
    first: Sequence[BoundExperts],
    between: Between,
    last: BoundExperts,
) -> Tensor:
    """`mixture` of parts of the tokens, whose exchanges are under way while experts compute."""
    ranks, dtype, outer, inner = parts[0].ranks, x_NI.dtype, first[0].slot.region, last.slot.region
    given = [_Operands.of(slots, parts[0], dtype) for slots in (first, [last])]
    # Each begins in the region in which it arrives: a backward that waited again would have to begin again too.
    with region(inner):
        weights = [TokensTrip.begun(half_NK, ranks) for half_NK in routes.weights_NK.chunk(len(parts))]
    with region(outer):
        tokens = [TokensTrip.begun(half_NI, ranks) for half_NI in x_NI.chunk(len(parts))]
    sums: list[Callable[[], Tensor]] = []
    for number, part in enumerate(parts):
        with region(outer):
            received = ReceivedRows(tokens[number](), part.order_S, part.place_MK)
            rows = _multiplied(received, part, given[0], number)
        x_SI = between(replace(routes, exchange=part), *rows)
        with region(inner):
            sums.append(SumsTrip.begun(_sums(x_SI, part, given[1], weights[number]()), ranks, dtype))
    return torch.cat([arrived() for arrived in sums])
