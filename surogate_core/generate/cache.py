"""The cache of keys and values, and attention that reads and writes it.

While it runs, the kernel `CachedAttention` takes the place of the op `attention`, so the blocks of every family are
those of training. Rows come in groups: all rows of a group belong to one slot and follow each other.

Shape suffixes: G groups, W rows of a group, N = G·W rows, S slots, T positions of a slot, H query heads, K key/value
heads, E head features, M = H/K query heads of a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from surogate_core.bundles import Kernel
from surogate_core.kernels.decoding import slot_attention
from surogate_core.kernels.ops import wide
from surogate_core.kernels.registry import KernelTable, using

if TYPE_CHECKING:
    from surogate_core.generate.weights import Weights

_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Shape = tuple[int, int, int]
"""(K, features of a key, features of a value)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The slot of each group, and the position of its first row."""

    slots_G: Tensor
    starts_G: Tensor
    width: int
    """W."""
    longest: int | None = None
    """More than the position of every row of a slot that counts; by default the slots' own number."""

    def positions(self) -> Tensor:
        """[N] int64."""
        offsets = torch.arange(self.width, device=self.starts_G.device)
        return (self.starts_G[:, None] + offsets).flatten()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[N, H, E]: every row reads its slot up to itself."""
        if q.device.type == "cpu":
            return cpu_attention(q, k, v, keys, values, self, scale)
        return attention(q, k, v, keys[:, : self.longest], values[:, : self.longest], self, scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Whole prompts one after the other, as in training."""

    slots_N: Tensor
    positions_N: Tensor
    cu_seqlens_D: Tensor
    """int32: the first row of each document, and the number of rows."""
    longest: int
    kernels: KernelTable
    """The run's own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[N, H, E] by the attention of training; writes keys and values into the slots."""
        keys[self.slots_N, self.positions_N] = k
        values[self.slots_N, self.positions_N] = v
        arguments = (q, k, v, self.cu_seqlens_D, self.longest, scale)
        found: Tensor = self.kernels.choose("attention", q.dtype, *arguments).function(*arguments)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """One row of each sequence, for its last token."""

    slots_N: Tensor
    positions_N: Tensor
    longest: int
    """At least the largest position + 1."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[N, H, E]: every row writes its key and value, and reads its slot up to itself."""
        return slot_attention(q, k, v, keys, values, self.slots_N, self.positions_N, self.longest, scale)


class Reader(Protocol):
    """The places of rows, and how they read the cache."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Write the rows' keys and values into their slots; [N, H, E]."""


class Cache:
    """The keys and values of all layers. The last slot takes rows that do not count."""

    def __init__(
        self, shapes: Sequence[Sequence[Shape]], *, slots: int, context: int, dtype: torch.dtype, device: torch.device
    ):
        self.slots, self.context, self.device = slots, context, device

        def empty(heads: int, features: int) -> Tensor:
            return torch.zeros(slots + 1, context, heads, features, dtype=dtype, device=device)

        self.layers = [[(empty(k, e), empty(k, f)) for k, e, f in calls] for calls in shapes]

    @staticmethod
    def bytes_per_token(shapes: Sequence[Sequence[Shape]], dtype: torch.dtype) -> int:
        """Bytes that a position of a slot takes in all layers."""
        return sum(k * (e + f) * dtype.itemsize for calls in shapes for k, e, f in calls)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of a slot to another."""
        for tensor in self._tensors():
            tensor[target, :length] = tensor[source, :length]

    def copy_prefixes(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first positions of several slots to others, none of which is a source."""
        if sources:
            device = self.device
            source_G, target_G = (torch.tensor(slots, device=device) for slots in (sources, targets))
            for tensor in self._tensors():
                tensor[target_G, :length] = tensor[source_G, :length]

    def _tensors(self) -> Iterator[Tensor]:
        return (tensor for calls in self.layers for tensors in calls for tensor in tensors)


@dataclass(slots=True)
class CachedAttention:
    """The op `attention` while a cache is in use: each row reads its slot up to itself."""

    cache: Cache
    reader: Reader | None = None
    layer: int = 0
    _calls: int = 0

    def begin(self, layer: int, reader: Reader) -> None:
        """The layer whose attention is called next, and the places of its rows."""
        self.layer, self.reader, self._calls = layer, reader, 0

    def __call__(
        self, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, cu_seqlens_S: Tensor, max_seqlen: int, scale: float
    ) -> Tensor:
        """The op."""
        keys_STKE, values_STKE = self.cache.layers[self.layer][self._calls]
        self._calls += 1
        assert self.reader is not None
        return self.reader.attend(q_NHE, k_NKE, v_NKE, keys_STKE, values_STKE, scale)


def with_own(kernels: KernelTable, **own: Callable[..., Any]) -> KernelTable:
    """The kernels of a run with others for these ops, whatever the dtype."""
    first = tuple(
        Kernel(op=op, name="generation", function=function, supports=lambda device, dtype: True, priority=1_000_000)
        for op, function in own.items()
    )
    return KernelTable(device=kernels.device, kernels=(*kernels.kernels, *first))


def attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    places: Places,
    scale: float,
) -> Tensor:
    """[N, H, E]; writes the rows' keys and values first. Static shapes, no wait for the device: every score of a slot
    is computed.
    """
    groups, width = len(places.slots_G), places.width
    _, heads, features = q_NHE.shape
    kv_heads = k_NKE.shape[1]
    positions_N = places.positions()
    slots_N = places.slots_G.repeat_interleave(width)
    keys_STKE[slots_N, positions_N] = k_NKE
    values_STKE[slots_N, positions_N] = v_NKE
    keys_GTKE, values_GTKE = keys_STKE[places.slots_G], values_STKE[places.slots_G]
    q = wide(q_NHE).view(groups, width, kv_heads, heads // kv_heads, features)
    scores = torch.einsum("gwkme,gtke->gkmwt", q, wide(keys_GTKE)) * scale
    order_T = torch.arange(keys_STKE.shape[1], device=q_NHE.device)
    visible = order_T <= positions_N.view(groups, 1, 1, width, 1)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    found = torch.einsum("gkmwt,gtke->gwkme", weights, wide(values_GTKE))
    return found.reshape(len(q_NHE), heads, -1).to(q_NHE.dtype)


def cpu_attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    places: Places,
    scale: float,
) -> Tensor:
    """The same, group by group, through torch's blocked kernel: the bits of a group depend on its own slot only."""
    width = places.width
    out = q_NHE.new_zeros(*q_NHE.shape[:2], v_NKE.shape[2])
    for group, (slot, start) in enumerate(zip(places.slots_G.tolist(), places.starts_G.tolist(), strict=True)):
        if slot == len(keys_STKE) - 1:
            continue
        rows, end = slice(group * width, (group + 1) * width), start + width
        keys_STKE[slot, start:end] = k_NKE[rows]
        values_STKE[slot, start:end] = v_NKE[rows]
        q, k, v = (t.transpose(0, 1)[None] for t in (q_NHE[rows], keys_STKE[slot, :end], values_STKE[slot, :end]))
        mask = _causal(width, end, q.dtype) if width > 1 else None
        out[rows] = _on_cpu(q.contiguous(), k, v, 0.0, False, attn_mask=mask, scale=scale)[0][0].transpose(0, 1)
    # For a query with a NaN torch's kernel gives 0, which would hide it.
    return out.masked_fill(q_NHE.sum(-1, keepdim=True).isnan(), float("nan"))


def _causal(width: int, end: int, dtype: torch.dtype) -> Tensor:
    """[W, end]: 0 where the last `width` of `end` positions see, otherwise minus infinity."""
    return torch.full((width, end), float("-inf"), dtype=dtype).triu(end - width + 1)


@dataclass(slots=True)
class _Recorder:
    """Notes the shapes that attention is called with."""

    found: list[Shape] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
        self.found.append((k.shape[1], k.shape[2], v.shape[2]))
        return q.new_empty(*q.shape[:2], v.shape[2])


def shapes_of(weights: Weights) -> list[list[Shape]]:
    """For each layer the shapes of its calls of attention, found by running each kind of layer on fake tensors."""
    known: dict[Any, list[Shape]] = {}
    found = []
    for piece in weights.plan.layers:
        signature = weights.programs.signature(piece)
        if signature not in known:
            recorder = _Recorder()
            with FakeTensorMode(), using(with_own(weights.programs.kernels, attention=recorder)):
                inputs = [
                    torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in weights.programs.layer_inputs(piece)
                ]
                weights.programs.layer_function(piece, training=False)(*inputs)
            known[signature] = recorder.found
        found.append(known[signature])
    return found
