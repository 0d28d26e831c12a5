"""Weights of which every rank keeps a share, gathered one piece at a time.

All buffers are static. The gathers run on a side stream that forks from the compute stream and joins it by events, so
that they overlap with the computation and a CUDA graph captures them. Every rank calls the same methods in the same
order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from surogate_core.bundles import Store
from surogate_core.engine.ranks.owned import Owned, Within
from surogate_core.engine.ranks.reduce import Allocate, plain_zeros
from surogate_core.engine.ranks.side_streams import FIRST, SideStream, flat_bytes, is_dense
from surogate_core.engine.ranks.stages import Stages
from surogate_core.engine.schedule import EMBED, HEAD
from surogate_core.engine.stores import DeviceStore

ALIGNMENT = 256
"""Alignment in bytes of a frozen tensor, and of a rank's share, in a gathered piece."""


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor in the gathered bytes of its key."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, gathered: Tensor) -> Tensor:
        """The tensor in a buffer."""
        part = gathered[self.offset : self.offset + self.nbytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What this rank keeps of a key."""

    shard: Tensor | None
    """None: the inner store has it. It never has an empty one."""
    share: int
    """Bytes of a rank's share: those of this rank's shard, or more if its shard is short."""
    views: tuple[_View, ...]


@dataclass(slots=True, eq=False)
class _Slot:
    """A buffer for the gathered bytes of one key."""

    buffer: Tensor
    key: str | None = None
    """The key whose bytes it has, or will have after `filled`."""
    held: bool = False
    """Whether the key is in use: prefetched and not released."""
    released: int = 0
    """Number of its last release."""
    start: torch.cuda.Event | None = None
    """The compute stream no longer reads the buffer."""
    filled: torch.cuda.Event | None = None
    """Not None: the compute stream does not wait for the bytes yet."""
    views: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)


class ShardedWeights(Store):
    """Weights of which each rank keeps a part, gathered piece by piece into one of two static buffers.

    `inner` keeps the shares elsewhere than on the device. `whole`: keys of which every rank keeps everything, in
    `inner` or on the device. A tied tensor belongs to them: sharded keys share nothing.

    A released piece stays gathered until its buffer is needed, so the turn from forward to backward gathers nothing
    again. Each pass over the pieces gathers anew: weights may have changed since, and a CUDA graph must gather whatever
    it reads.
    """

    def __init__(
        self,
        stages: Stages,
        device: torch.device,
        *,
        inner: Store | None = None,
        whole: Collection[str] = (EMBED, HEAD),
        allocate: Allocate = plain_zeros,
    ):
        """`allocate`: memory that the fabric writes to."""
        self._allocate = allocate
        self._stages, self._device, self._inner = stages, device, inner
        self._whole: Store = inner or DeviceStore("weights")
        self._whole_keys = frozenset(whole)
        self._kept: dict[str, _Kept] = {}
        self._side = SideStream(device, priority=FIRST)
        self._slots: list[_Slot] = []
        self._releases = 0
        self._waiting: _Slot | None = None
        """The slot whose gather begins when the inner store has brought this rank's share."""

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Keep this rank's share of the tensors' bytes."""
        if key in self._whole_keys or not tensors:
            self._whole.put(key, tensors)
            return
        dense = [t if is_dense(t) else t.contiguous() for t in tensors]
        views, total = [], 0
        for t in dense:
            views.append(_View(total, t.nbytes, t.dtype, tuple(t.shape), tuple(t.stride())))
            total += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        share = -(-total // (ALIGNMENT * self._stages.parts)) * ALIGNMENT
        shard = torch.zeros(share, dtype=torch.uint8, device=self._device)
        mine = self._stages.own * share
        for t, view in zip(dense, views, strict=True):
            start, stop = max(view.offset, mine), min(view.offset + view.nbytes, mine + share)
            if start < stop:
                part = flat_bytes(t)[start - view.offset : stop - view.offset]
                shard[start - mine : stop - mine].copy_(part)
        self._keep(key, shard, share, views)

    def put_trained(self, key: str, owned: Owned, members: Sequence[Within]) -> None:
        """Keep a live part of a piece's range of trained weights. `members`: the key's tensors, in order."""
        longest, item = owned.longest, owned.shard.itemsize
        even = all(start == min(rank * longest, owned.elements) for rank, (start, _) in enumerate(owned.owners))
        assert even, "only the last parts may be shorter"
        views = []
        for member in members:
            assert member.piece == key, "a tied tensor is kept whole"
            stride = torch.empty(member.shape, device="meta").stride()
            nbytes = math.prod(member.shape) * item
            views.append(_View(member.offset * item, nbytes, owned.shard.dtype, member.shape, stride))
        self._keep(key, owned.shard, longest * item, views)

    def _keep(self, key: str, shard: Tensor, share: int, views: Sequence[_View]) -> None:
        if self._inner is not None and shard.numel():
            self._inner.put(key, (shard,))
            self._kept[key] = _Kept(None, share, tuple(views))
        else:
            self._kept[key] = _Kept(shard, share, tuple(views))
        self._slots.clear()

    def begin_pass(self) -> None:
        """Gather every piece anew from here on. Nothing is in use, even if an error has ended the pass before."""
        self._whole.begin_pass()
        self._waiting = None
        for slot in self._slots:
            slot.key, slot.held, slot.filled = None, False, None

    def prefetch(self, key: str) -> None:
        """Start to gather the key's tensors."""
        if key not in self._kept:
            self._whole.prefetch(key)
        elif self._slot_of(key) is None:
            slot = self._free_slot()
            slot.key, slot.held, slot.start = key, True, self._side.fork()
            self._begin_waiting()
            if self._inner is None:
                self._gather(slot)
                return
            # An inner store may block this process until its copy is launched. The computation beside the gather is
            # launched before that. All ranks do the same: each has its collectives in the same order.
            if self._kept[key].shard is None:
                with self._side.after(slot.start):
                    self._inner.prefetch(key)
            self._waiting = slot

    def _slot_of(self, key: str) -> _Slot | None:
        """The slot that has the key's bytes, in use from here on."""
        for slot in self._slots:
            if slot.key == key:
                slot.held = True
                return slot
        return None

    def _free_slot(self) -> _Slot:
        """The slot, out of use, that was released first."""
        if not self._slots:
            size = max(kept.share for kept in self._kept.values()) * self._stages.parts
            self._slots = [_Slot(self._allocate(size, torch.uint8, self._device)) for _ in range(2)]
        free = [slot for slot in self._slots if not slot.held]
        assert free, "weights of two pieces are in use; release one before the next is fetched"
        return min(free, key=lambda slot: slot.released)

    def _begin_waiting(self) -> None:
        """Begin the gather whose share was on its way."""
        if self._waiting is not None:
            slot, self._waiting = self._waiting, None
            self._gather(slot)

    def _gather(self, slot: _Slot) -> None:
        key = slot.key
        assert key is not None
        kept, at = self._kept[key], self._stages.own
        gathered = slot.buffer[: kept.share * self._stages.parts]
        with self._side.after(slot.start):
            shard = kept.shard
            if shard is None:
                assert self._inner is not None
                (shard,) = self._inner.fetch(key)
            gathered[at * kept.share :][: shard.nbytes].copy_(flat_bytes(shard))
            self._stages.gather(gathered, kept.share)
            if kept.shard is None and self._inner is not None:
                self._inner.release(key)
        slot.filled = self._side.done()

    def fetch(self, key: str) -> Sequence[Tensor]:
        """The gathered tensors, valid until the key is released."""
        if key not in self._kept:
            return self._whole.fetch(key)
        self.prefetch(key)
        slot = self._slot_of(key)
        assert slot is not None
        if slot is self._waiting:
            self._begin_waiting()
        self._side.join(slot.filled)
        slot.filled = None
        if key not in slot.views:
            slot.views[key] = tuple(view.of(slot.buffer) for view in self._kept[key].views)
        return slot.views[key]

    def release(self, key: str) -> None:
        """Let another key have the buffer; begin the gather of the next piece if it waits for its share."""
        if key not in self._kept:
            self._whole.release(key)
        for slot in self._slots:
            if slot.key == key and slot.held:
                if slot is self._waiting:
                    self._begin_waiting()
                self._side.join(slot.filled)
                self._releases += 1
                slot.held, slot.filled, slot.released = False, None, self._releases
        self._begin_waiting()

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held, by place, with the buffers."""
        kept = sum(k.shard.nbytes for k in self._kept.values() if k.shard is not None)
        places = self._whole.nbytes()
        return {**places, "device": places["device"] + kept + sum(slot.buffer.nbytes for slot in self._slots)}
