"""The cache: what a sequence's next row needs of the rows before, for every mixer that blocks declare.

Attention keeps the keys and values of every position, recurrences and convolutions their states. A runner runs the
blocks of training inside of `mixing(FromCache)`, by which their mixers read and write the cache. Rows come in groups:
all rows of a group belong to one slot and follow each other.

Shape suffixes: G groups, W rows of a group, N = G·W rows, S slots, T positions of a slot, H query heads, K key/value
heads, E head features, M = H/K query heads of a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from surogate_core.bundles import Kernel
from surogate_core.dsl.mixers import KeyValues, Packed, Spec, States
from surogate_core.kernels.decoding import slot_attention
from surogate_core.kernels.ops import wide
from surogate_core.kernels.registry import KernelTable

if TYPE_CHECKING:
    from surogate_core.generate.weights import Weights

_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def mixers_of(weights: Weights) -> list[tuple[Spec, ...]]:
    """What the block of each layer declares."""
    return [() if piece.block is None else piece.block.mixer_specs() for piece in weights.plan.layers]


@dataclass(frozen=True, slots=True)
class Kept:
    """The keys and values of an attention, [S, T, K, E] and [S, T, K, F] in the model's dtype."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Carried:
    """The states of a recurrence, each [S, …] fp32. Decoding moves on from a prompt, so the states behind the prompt
    that a slot begins with are kept beside the running ones.
    """

    running: tuple[Tensor, ...]
    behind: tuple[Tensor, ...]

    def begin(self, sources: Sequence[int] | Tensor, targets: Sequence[int] | Tensor) -> None:
        """Let slots begin behind the prompts of these slots."""
        for running, behind in zip(self.running, self.behind, strict=True):
            running[targets] = behind[targets] = behind[sources]

    def remember(self, slots: Tensor) -> None:
        """The prompts of these slots have gone through the layers."""
        for running, behind in zip(self.running, self.behind, strict=True):
            behind[slots] = running[slots]

    def initial(self, slots_R: Tensor, fresh_R: Tensor | None = None) -> list[Tensor]:
        """The states of these slots, zeros where they are fresh."""
        found = [state[slots_R] for state in self.running]
        if fresh_R is None:
            return found
        return [s.masked_fill(fresh_R.view(-1, *[1] * (s.ndim - 1)), 0.0) for s in found]

    def write(self, slots_R: Tensor, finals: Sequence[Tensor]) -> None:
        """The states of these slots after a scan."""
        for running, final in zip(self.running, finals, strict=True):
            running[slots_R] = final


class Reader(Protocol):
    """The places of rows, and how they read the cache."""

    def attend(self, spec: KeyValues, kept: Kept, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """Write the rows' keys and values into their slots; [N, H, F]."""

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Move the states of the rows' slots on; [N, …]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The slot of each group, and the position of its first row."""

    slots_G: Tensor
    starts_G: Tensor
    width: int
    """W."""
    longest: int | None = None
    """More than the position of every row of a slot that counts; by default the slots' own number."""
    counts: Sequence[int] | None = None
    """The rows of each group that count, which are its first; by default all."""

    def positions(self) -> Tensor:
        """[N] int64."""
        offsets = torch.arange(self.width, device=self.starts_G.device)
        return (self.starts_G[:, None] + offsets).flatten()

    def attend(self, spec: KeyValues, kept: Kept, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """[N, H, F]: every row reads its slot up to itself."""
        if q.device.type == "cpu":
            return cpu_attention(spec, q, k, v, kept.keys, kept.values, self, sinks)
        keys, values = kept.keys[:, : self.longest], kept.values[:, : self.longest]
        return attention(spec, q, k, v, keys, values, self, sinks)

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …], group by group: a later group of a slot begins with what an earlier one left."""
        found = []
        for group, start in enumerate(self.starts_G.tolist()):
            count = self.width if self.counts is None else self.counts[group]
            first, slots = group * self.width, self.slots_G[group : group + 1]
            borders = torch.tensor([0, count], dtype=torch.int32, device=slots.device)
            initial = carried.initial(slots) if start else None
            some = [row[first : first + count] for row in rows]
            y, finals = spec.scan(*some, borders=borders, initial=initial, finals=True, **parameters)
            carried.write(slots, finals)
            found.append(torch.cat([y, y.new_zeros(self.width - count, *y.shape[1:])]))
        return torch.cat(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Whole prompts one after the other, as in training."""

    slots_D: Tensor
    """The slot of each document."""
    slots_N: Tensor
    positions_N: Tensor
    cu_seqlens_D: Tensor
    """int32: the first row of each document, and the number of rows."""
    longest: int

    def attend(self, spec: KeyValues, kept: Kept, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """[N, H, F] by the attention of training; writes keys and values into the slots."""
        kept.keys[self.slots_N, self.positions_N] = k
        kept.values[self.slots_N, self.positions_N] = v
        return Packed(self.cu_seqlens_D, self.longest).attend(0, spec, q, k, v, sinks)

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …] by the scan of training; writes the states behind the prompts."""
        y, finals = spec.scan(*rows, borders=self.cu_seqlens_D, initial=None, finals=True, **parameters)
        carried.write(self.slots_D, finals)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One row of each sequence, for its last token."""

    slots_N: Tensor
    positions_N: Tensor
    longest: int
    """At least the largest position + 1."""

    def attend(self, spec: KeyValues, kept: Kept, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """[N, H, F]: every row writes its key and value, and reads its slot up to itself."""
        where = (self.slots_N, self.positions_N, self.longest)
        return slot_attention(q, k, v, kept.keys, kept.values, *where, spec.scale, **spec.named(sinks))

    def recur(self, spec: States, carried: Carried, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …]: every row is a run of its own."""
        initial = carried.initial(self.slots_N)
        y, finals = spec.scan(*rows, borders=None, initial=initial, finals=True, **parameters)
        carried.write(self.slots_N, finals)
        return y


class Cache:
    """What all layers keep of every slot. The last slot takes rows that do not count."""

    def __init__(
        self, mixers: Sequence[Sequence[Spec]], *, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ):
        self.slots, self.context, self.device, self.mixers = slots, context, device, mixers
        self.stateful = any(isinstance(spec, States) for specs in mixers for spec in specs)
        """Whether something has no positions, so that the beginning of a prompt cannot be had from its slot."""

        def kept(spec: Spec) -> Kept | Carried:
            if isinstance(spec, KeyValues):
                shapes = ((slots + 1, context, spec.kv_heads, features) for features in (spec.keys, spec.values))
                return Kept(*(torch.zeros(shape, dtype=dtype, device=device) for shape in shapes))
            running, behind = (
                tuple(torch.zeros(slots + 1, *shape, device=device) for shape in spec.shapes) for _ in range(2)
            )
            return Carried(running, behind)

        self.layers = [[kept(spec) for spec in specs] for specs in mixers]

    @staticmethod
    def slot_bytes(mixers: Sequence[Sequence[Spec]], context: int, dtype: torch.dtype) -> int:
        """Bytes that a slot takes in all layers."""

        def of(spec: Spec) -> int:
            if isinstance(spec, States):
                return 2 * torch.float32.itemsize * sum(map(prod, spec.shapes))
            return context * features_of(spec) * dtype.itemsize

        return sum(of(spec) for specs in mixers for spec in specs)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let a slot begin with the first positions of another."""
        for one in self._all():
            if isinstance(one, Carried):
                one.begin([source], [target])
            elif source != target:
                for tensor in (one.keys, one.values):
                    tensor[target, :length] = tensor[source, :length]

    def copy_prefixes(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Let slots begin with the first positions of others, none of which is among them."""
        if not sources:
            return
        source_G, target_G = (torch.tensor(slots, device=self.device) for slots in (sources, targets))
        for one in self._all():
            if isinstance(one, Carried):
                one.begin(source_G, target_G)
            else:
                for tensor in (one.keys, one.values):
                    tensor[target_G, :length] = tensor[source_G, :length]

    def remember(self, slots: Sequence[int]) -> None:
        """The prompts of these slots have gone through all layers."""
        if self.stateful and slots:
            slots_G = torch.tensor(slots, device=self.device)
            for one in self._all():
                if isinstance(one, Carried):
                    one.remember(slots_G)

    def _all(self) -> Iterator[Kept | Carried]:
        return (one for layer in self.layers for one in layer)


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
        assert isinstance(kept, Kept)
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
    keys_STKE: Tensor,
    values_STKF: Tensor,
    places: Places,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """[N, H, F]; writes the rows' keys and values first. Static shapes, no wait for the device: every score of a slot
    is computed.
    """
    groups, width = len(places.slots_G), places.width
    _, heads, features = q_NHE.shape
    kv_heads = k_NKE.shape[1]
    positions_N = places.positions()
    slots_N = places.slots_G.repeat_interleave(width)
    keys_STKE[slots_N, positions_N] = k_NKE
    values_STKF[slots_N, positions_N] = v_NKF
    keys_GTKE, values_GTKF = keys_STKE[places.slots_G], values_STKF[places.slots_G]
    q = wide(q_NHE).view(groups, width, kv_heads, heads // kv_heads, features)
    scores = torch.einsum("gwkme,gtke->gkmwt", q, wide(keys_GTKE)) * spec.scale
    visible = seen(positions_N.view(groups, 1, 1, width, 1), keys_STKE.shape[1], spec.window)
    sinks = None if sinks_H is None else sinks_H.view(kv_heads, -1, 1, 1)
    weights = weights_of(scores, visible, spec.softcap, sinks)
    found = torch.einsum("gkmwt,gtkf->gwkmf", weights, wide(values_GTKF))
    return found.reshape(len(q_NHE), heads, -1).to(q_NHE.dtype)


def cpu_attention(
    spec: KeyValues,
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    keys_STKE: Tensor,
    values_STKF: Tensor,
    places: Places,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The same, group by group: the bits of a group depend on its own slot only. Plain attention goes through torch's
    blocked kernel.
    """
    width, plain = places.width, not spec.named(sinks_H)
    out = q_NHE.new_zeros(*q_NHE.shape[:2], v_NKF.shape[2])
    for group, (slot, start) in enumerate(zip(places.slots_G.tolist(), places.starts_G.tolist(), strict=True)):
        if slot == len(keys_STKE) - 1:
            continue
        rows, end = slice(group * width, (group + 1) * width), start + width
        if not plain:
            one = Places(
                slots_G=places.slots_G[group : group + 1], starts_G=places.starts_G[group : group + 1], width=width
            )
            part = (q_NHE[rows], k_NKE[rows], v_NKF[rows], keys_STKE[:, :end], values_STKF[:, :end])
            out[rows] = attention(spec, *part, one, sinks_H)
            continue
        keys_STKE[slot, start:end] = k_NKE[rows]
        values_STKF[slot, start:end] = v_NKF[rows]
        q, k, v = (t.transpose(0, 1)[None] for t in (q_NHE[rows], keys_STKE[slot, :end], values_STKF[slot, :end]))
        mask = _causal(width, end, q.dtype) if width > 1 else None
        out[rows] = _on_cpu(q.contiguous(), k, v, 0.0, False, attn_mask=mask, scale=spec.scale)[0][0].transpose(0, 1)
    # For a query with a NaN torch's kernel gives 0, which would hide it.
    return out.masked_fill(q_NHE.sum(-1, keepdim=True).isnan(), float("nan"))


def seen(positions: Tensor, length: int, window: int) -> Tensor:
    """[…, T] bool: the first `length` positions that each of `positions` […, 1] sees."""
    order_T = torch.arange(length, device=positions.device)
    visible = order_T <= positions
    return visible & (order_T > positions - window) if window else visible


def weights_of(scores: Tensor, visible: Tensor, softcap: float, sinks: Tensor | None) -> Tensor:
    """Softmax of the visible scores. `sinks`: scores of a further position without a value, as scores[…, :1]."""
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    joined = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(joined, dim=-1)[..., :-1]


def _causal(width: int, end: int, dtype: torch.dtype) -> Tensor:
    """[W, end]: 0 where the last `width` of `end` positions see, otherwise minus infinity."""
    return torch.full((width, end), float("-inf"), dtype=dtype).triu(end - width + 1)
