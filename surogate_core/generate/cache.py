"""The cache: what a sequence's next row needs of the rows before, for every mixer that blocks declare.

Attention keeps the keys and values of every position, recurrences and convolutions their states. A runner runs the
blocks of training inside of `mixing(FromCache)`, by which their mixers read and write the cache. Rows come in groups:
all rows of a group belong to one slot and follow each other.

Shape suffixes: G groups, W rows of a group, N = G·W rows, S slots, T positions of a slot, H query heads, K key/value
heads, E head features, M = H/K query heads of a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from surogate_core.bundles import Kernel
from surogate_core.dsl.mixers import KeyValues, Packed, Spec, States
from surogate_core.generate.sequences import SEGMENT
from surogate_core.kernels.decoding import seen, slot_attention
from surogate_core.kernels.ops import attention_weights, capped, wide
from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.states import put_states

if TYPE_CHECKING:
    from surogate_core.generate.weights import Weights

_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def mixers_of(weights: Weights) -> list[tuple[Spec, ...]]:
    """What the block of each layer declares; an attention that borrows keys and values knows whose."""
    found: list[tuple[Spec, ...]] = []
    for piece in weights.plan.layers:
        specs = () if piece.block is None else piece.block.mixer_specs()
        sources = {spec.name: source for spec, source in zip(piece.takes, piece.sources, strict=True)}
        found.append(tuple(_with_lender(spec, sources, found) for spec in specs))
    return found


def _with_lender(spec: Spec, sources: Mapping[str, tuple[int, str]], earlier: Sequence[Sequence[Spec]]) -> Spec:
    if not isinstance(spec, KeyValues) or not spec.borrows:
        return spec
    keys, _ = spec.relayed
    layer, name = sources[keys.name]
    lenders = (isinstance(one, KeyValues) and one.lends and one.relayed[0].name == name for one in earlier[layer])
    return replace(spec, lender=(layer, next(number for number, found in enumerate(lenders) if found)))


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """The keys and values of an attention, [S, T, K, E] and [S, T, K, F] in the model's dtype.

    With a window that is much shorter than a slot they are rings: position p is at place p mod T. Decoding overwrites
    what a prompt left there, so a copy from behind the prompt that a slot begins with is kept beside them.
    """

    now: tuple[Tensor, Tensor]
    behind: tuple[Tensor, ...] = ()
    """Empty without rings."""

    @classmethod
    def of(cls, spec: KeyValues, slots: int, context: int, dtype: torch.dtype, device: torch.device) -> AttentionCache:
        """Zeros for `slots` slots and the one that takes rows that do not count."""
        places = places_of(spec, context)
        keys, values, *behind = (
            torch.zeros(slots + 1, places, spec.kv_heads, features, dtype=dtype, device=device)
            for features in (spec.keys, spec.values) * (1 if places == context else 2)
        )
        return cls((keys, values), tuple(behind))

    def begin(self, sources: Slots, targets: Slots, length: int) -> None:
        """Let slots begin with the first positions of others, or with whole prompts if these are rings."""
        if self.behind:
            _begin(self.now, self.behind, sources, targets)
        else:
            for tensor in self.now:
                tensor[targets, :length] = tensor[sources, :length]

    def write(self, slots_N: Tensor, positions_N: Tensor, k: Tensor, v: Tensor) -> None:
        """Each row's key and value; no two rows of a slot that counts have one place."""
        places_N = positions_N % self.now[0].shape[1] if self.behind else positions_N
        for tensor, rows in zip(self.now, (k, v), strict=True):
            tensor[slots_N, places_N] = rows


@dataclass(frozen=True, slots=True)
class Carried:
    """The states of a recurrence, each [S, …] fp32. Decoding moves on from a prompt, so the states behind the prompt
    that a slot begins with are kept beside the running ones.
    """

    now: tuple[Tensor, ...]
    behind: tuple[Tensor, ...]

    @classmethod
    def of(cls, spec: States, slots: int, device: torch.device) -> Carried:
        """Zeros for `slots` slots and the one that takes rows that do not count."""
        now, behind = (tuple(torch.zeros(slots + 1, *s, device=device) for s in spec.shapes) for _ in range(2))
        return cls(now, behind)

    def begin(self, sources: Slots, targets: Slots, length: int) -> None:
        """Let slots begin behind the prompts of others."""
        _begin(self.now, self.behind, sources, targets)

    def initial(self, slots_R: Tensor) -> list[Tensor]:
        """The states of these slots."""
        return [state[slots_R] for state in self.now]

    def write(self, slots_R: Tensor, finals: Sequence[Tensor]) -> None:
        """The states of these slots after a scan; those of rows that do not count remain zeros."""
        put_states(self.now, slots_R, finals)


Slots = Sequence[int] | Tensor


def _begin(now: Sequence[Tensor], behind: Sequence[Tensor], sources: Slots, targets: Slots) -> None:
    for tensor, kept in zip(now, behind, strict=True):
        tensor[targets] = kept[targets] = kept[sources]


def places_of(spec: KeyValues, context: int) -> int:
    """Positions of a slot that an attention keeps: all, or a ring if that and its copy are less than half as many.

    A segment of a prompt is written before its first row reads, so a ring has room for it beside the window. Layers
    that borrow read when all segments are written, which no ring has room for.
    """
    if spec.lends or spec.borrows:
        return context
    ring = -(-(spec.window + SEGMENT) // SEGMENT) * SEGMENT
    return ring if spec.window and 4 * ring <= context else context


class Reader(Protocol):
    """The places of rows, and how they read the cache."""

    def attend(
        self, spec: KeyValues, kept: AttentionCache, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Write the rows' keys and values into their slots; [N, H, F]."""

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Move the states of the rows' slots on; [N, …]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlaces:
    """The slot of each group, and the position of its first row."""

    slots_G: Tensor
    starts_G: Tensor
    width: int
    """W."""
    longest: int | None = None
    """An upper bound: every row that counts has a lower position. By default the length of a slot."""
    counts: Sequence[int] | None = None
    """The rows of each group that count, which are its first; by default all."""

    def positions(self) -> Tensor:
        """[N] int64."""
        offsets = torch.arange(self.width, device=self.starts_G.device)
        return (self.starts_G[:, None] + offsets).flatten()

    def attend(
        self, spec: KeyValues, kept: AttentionCache, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """[N, H, F]: every row reads its slot up to itself."""
        if q.device.type == "cpu":
            return cpu_attention(spec, q, k, v, kept, self, sinks)
        return attention(spec, q, k, v, kept, self, sinks)

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …], group by group: a later group of a slot begins with what an earlier one left."""
        found = []
        for group, start in enumerate(self.starts_G.tolist()):
            count = self.width if self.counts is None else self.counts[group]
            first, slots = group * self.width, self.slots_G[group : group + 1]
            borders = torch.tensor([0, count], dtype=torch.int32, device=slots.device)
            initial = carried.initial(slots) if start else None
            some = [row[first : first + count] for row in rows]
            y, finals = spec.run(some, borders, initial, parameters)
            carried.write(slots, finals)
            found.append(torch.cat([y, y.new_zeros(self.width - count, *y.shape[1:])]))
        return torch.cat(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePrompts:
    """Whole prompts one after the other, as in training."""

    slots_D: Tensor
    """The slot of each document."""
    slots_N: Tensor
    positions_N: Tensor
    lasts_N: Tensor
    """The last position of each row's prompt."""
    cu_seqlens_D: Tensor
    """int32: the first row of each document, and the number of rows."""
    longest: int

    def attend(
        self, spec: KeyValues, kept: AttentionCache, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """[N, H, F] by the attention of training; writes keys and values into the slots."""
        slots_N = self.slots_N
        if kept.behind:
            last = kept.now[0].shape[1] - 1
            slots_N = torch.where(self.lasts_N - self.positions_N <= last, slots_N, len(kept.now[0]) - 1)
        kept.write(slots_N, self.positions_N, k, v)
        return Packed(self.cu_seqlens_D, self.longest).attend(0, spec, q, k, v, sinks)

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …] by the scan of training; writes the states behind the prompts."""
        y, finals = spec.run(rows, self.cu_seqlens_D, None, parameters)
        carried.write(self.slots_D, finals)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class LastTokens:
    """One row of each sequence, for its last token, and perhaps rows for drafts behind it."""

    slots_N: Tensor
    positions_N: Tensor
    longest: int
    """At least the largest position + 1."""
    drafted: bool = False
    """Whether a slot may have several rows."""

    def attend(
        self, spec: KeyValues, kept: AttentionCache, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """[N, H, F]: every row writes its key and value, and reads its slot up to itself."""
        if self.drafted:
            # A kernel's rows run side by side, so what one writes another may not see.
            kept.write(self.slots_N, self.positions_N, k, v)
        keys, values = kept.now
        slots, positions, named = self.slots_N, self.positions_N, spec.named(sinks)
        return slot_attention(q, k, v, keys, values, slots, positions, self.longest, spec.scale, **named)

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …]: every row is a run of its own."""
        return spec.advance(rows, carried.now, self.slots_N, parameters)


class Cache:
    """What all layers keep of every slot. The last slot takes rows that do not count."""

    def __init__(
        self, mixers: Sequence[Sequence[Spec]], *, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ):
        self.slots, self.context, self.device, self.mixers = slots, context, device, mixers

        def kept(spec: Spec) -> AttentionCache | Carried:
            if not isinstance(spec, KeyValues):
                return Carried.of(spec, slots, device)
            if spec.lender is not None:
                layer, number = spec.lender
                return self.layers[layer][number]
            return AttentionCache.of(spec, slots, context, dtype, device)

        self.layers: list[list[AttentionCache | Carried]] = []
        for specs in mixers:
            self.layers.append([kept(spec) for spec in specs])
        self.whole = any(one.behind for one in self._all())
        """Whether slots can begin with whole prompts only, and prompts go through the layers in the order of their
        positions: states and rings have nothing of the positions before."""

    @staticmethod
    def slot_bytes(mixers: Sequence[Sequence[Spec]], context: int, dtype: torch.dtype) -> int:
        """Bytes that a slot takes in all layers."""

        def of(spec: Spec) -> int:
            if isinstance(spec, States):
                return 2 * torch.float32.itemsize * sum(map(prod, spec.shapes))
            if spec.lender is not None:
                return 0
            places = places_of(spec, context)
            return (places if places == context else 2 * places) * features_of(spec) * dtype.itemsize

        return sum(of(spec) for specs in mixers for spec in specs)

    def copy_prefixes(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Let slots begin with the first positions of others, none of which is among them."""
        if sources:
            source_G, target_G = (torch.tensor(slots, device=self.device) for slots in (sources, targets))
            for one in self._all():
                one.begin(source_G, target_G, length)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first positions of another."""
        for one in self._all():
            one.begin([source], [target], length)

    def rewind(self, slot: int) -> None:
        """Let a slot begin with its own prompt again."""
        for one in self._all():
            if one.behind:
                one.begin([slot], [slot], 0)

    def remember(self, slots: Sequence[int]) -> None:
        """The prompts of these slots have gone through all layers."""
        slots_G = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for one in self._all() if slots else ():
            for now, behind in zip(one.now, one.behind, strict=False):
                behind[slots_G] = now[slots_G]

    def _all(self) -> Iterator[AttentionCache | Carried]:
        """Each once, although layers may share one."""
        return iter({id(one): one for layer in self.layers for one in layer}.values())


def features_of(spec: KeyValues) -> int:
    """Elements of the keys and values of a position."""
    return spec.kv_heads * (spec.keys + spec.values)


@dataclass(slots=True)
class FromCache:
    """How rows see each other while a cache is in use: each reads its slot up to itself."""

    cache: Cache
    reader: Reader | None = None
    layer: int = 0
    hides_borders: str = "in generation"

    def begin(self, layer: int, reader: Reader) -> None:
        """The layer whose mixers are called next, and the places of its rows."""
        self.layer, self.reader = layer, reader

    def attend(self, number: int, spec: KeyValues, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """[N, H, F]."""
        kept = self.cache.layers[self.layer][number]
        assert self.reader is not None
        assert isinstance(kept, AttentionCache)
        return self.reader.attend(spec, kept, q, k, v, sinks)

    def recur(self, number: int, spec: States, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …]."""
        carried = self.cache.layers[self.layer][number]
        assert self.reader is not None
        assert isinstance(carried, Carried)
        return self.reader.recur(spec, carried, rows, parameters)


def with_own(kernels: KernelTable, **own: Callable[..., Any]) -> KernelTable:
    """The kernels of a run with others for these ops, whatever the dtype."""
    first = tuple(
        Kernel(op=op, name="generation", function=function, supports=lambda device, dtype: True, priority=1_000_000)
        for op, function in own.items()
    )
    return KernelTable(device=kernels.device, kernels=(*kernels.kernels, *first))


def attention(
    spec: KeyValues,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    kept: AttentionCache,
    places: SlotPlaces,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[N, H, F]; writes the rows' keys and values first. Static shapes, no wait for the device: every score of a slot
    is computed.
    """
    groups, width = len(places.slots_G), places.width
    _, heads, features = q_NHE.shape
    kv_heads = k_NKE.shape[1]
    positions_N = places.positions()
    kept.write(places.slots_G.repeat_interleave(width), positions_N, k_NKE, v_NKF)
    keys_GTKE, values_GTKF = (tensor[:, : places.longest][places.slots_G] for tensor in kept.now)
    q = wide(q_NHE).view(groups, width, kv_heads, heads // kv_heads, features)
    scores = capped(torch.einsum("gwkme,gtke->gkmwt", q, wide(keys_GTKE)) * spec.scale, spec.softcap)
    order_T = torch.arange(keys_GTKE.shape[1], device=q_NHE.device)
    visible = seen(positions_N.view(groups, 1, 1, width, 1), order_T, spec.window, kept.now[0].shape[1])
    weights = attention_weights(scores, visible, None if sinks_H is None else sinks_H.view(kv_heads, -1, 1, 1))
    # What no row sees may be anything, such as of a draft that was rejected: zero times NaN would be NaN.
    values_GTKF.masked_fill_(~visible.any(dim=-2).view(groups, -1, 1, 1), 0.0)
    found = torch.einsum("gkmwt,gtkf->gwkmf", weights, wide(values_GTKF))
    return found.reshape(len(q_NHE), heads, -1).to(q_NHE.dtype)


def cpu_attention(
    spec: KeyValues,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    kept: AttentionCache,
    places: SlotPlaces,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The same, group by group: the bits of a group depend on its own slot only. Plain attention goes through torch's
    blocked kernel.
    """
    width, dummy = places.width, len(kept.now[0]) - 1
    # torch's kernel wants values of as many features as keys.
    plain = not spec.named(sinks_H) and spec.keys == spec.values
    out = q_NHE.new_zeros(*q_NHE.shape[:2], v_NKF.shape[2])
    for group, (slot, start) in enumerate(zip(places.slots_G.tolist(), places.starts_G.tolist(), strict=True)):
        if slot == dummy:
            continue
        rows, end = slice(group * width, (group + 1) * width), start + width
        q, k, v = q_NHE[rows], k_NKE[rows], v_NKF[rows]
        if not plain:
            slots, starts = (t[group : group + 1] for t in (places.slots_G, places.starts_G))
            one = SlotPlaces(slots_G=slots, starts_G=starts, width=width, longest=end)
            out[rows] = attention(spec, q, k, v, kept, one, sinks_H)
            continue
        for tensor, written in zip(kept.now, (k, v), strict=True):
            tensor[slot, start:end] = written
        q, k, v = (t.transpose(0, 1)[None] for t in (q, *(tensor[slot, :end] for tensor in kept.now)))
        mask = _causal(width, end, q.dtype) if width > 1 else None
        out[rows] = _on_cpu(q.contiguous(), k, v, 0.0, False, attn_mask=mask, scale=spec.scale)[0][0].transpose(0, 1)
    # For a query with a NaN torch's kernel gives 0, which would hide it.
    return out.masked_fill(q_NHE.sum(-1, keepdim=True).isnan(), float("nan"))


def _causal(width: int, end: int, dtype: torch.dtype) -> Tensor:
    """[W, end]: 0 where the last `width` of `end` positions see, otherwise minus infinity."""
    return torch.full((width, end), float("-inf"), dtype=dtype).triu(end - width + 1)
