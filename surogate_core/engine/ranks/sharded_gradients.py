"""Gradient sums of which every rank keeps a part, reduced one piece at a time.

All buffers are static. The reductions run on a side stream that forks from the compute stream and joins it by events,
so that they overlap with the computation and a CUDA graph captures them. Every rank calls the same methods in the same
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from surogate_core.bundles import GradientStore
from surogate_core.engine.ranks.embedding_rows import EmbeddingRows
from surogate_core.engine.ranks.owned import Owned, Within
from surogate_core.engine.ranks.reduce import Allocate, plain_zeros
from surogate_core.engine.ranks.side_streams import FIRST, SideStream
from surogate_core.engine.ranks.stages import Stages
from surogate_core.engine.schedule import EMBED, HEAD, layer_key
from surogate_core.kernels.registry import KernelTable, using

LAST = (layer_key(0), EMBED)
"""The pieces that a backward releases last."""


@dataclass(slots=True, eq=False)
class _Room:
    """A buffer for the sums of one piece."""

    buffer: Tensor
    piece: str | None = None


class ShardedGradients(GradientStore):
    """Gradient sums of which each rank keeps its part; a micro-step's are added over the ranks when a piece releases
    them.

    A piece's sums of one micro-step start from zeros in a static buffer: layers share two, of the size of the largest;
    the embedding and the head share one. A tensor that is tied to another piece is in the buffer of that piece, and is
    reduced with it.

    With `written`, a layer's sums do not start from zeros: the backward writes them, which saves a pass
    over the buffer, and one that the additions would read.

    With `later`, nothing is reduced at the end of a micro-step, where no computation is left to run beside it, unless
    the micro-step is the last one. What the backward releases last, the first layer and the embedding, is reduced
    beside the end of the next micro-step's forward. If no other piece needs their buffer, the sums of the embedding, or
    of the head, stay in it and are reduced in the last micro-step alone, which also is less to send and to add.

    With `rows`, ranks send the rows that a micro-step adds to the embedding, which never has sums in a buffer.
    """

    def __init__(
        self,
        stages: Stages,
        device: torch.device,
        *,
        allocate: Allocate = plain_zeros,
        everywhere: bool = True,
        written: bool = False,
        later: bool = False,
        kernels: KernelTable | None = None,
    ):
        """`allocate`: memory that the fabric writes to. `everywhere`: whether sums are over all replicas. `kernels`:
        those of the run.
        """
        self._everywhere, self._writes, self.later = everywhere, written, later
        self.rows: EmbeddingRows | None = None
        """Set before the first micro-step; needs `later`."""
        self._kernels = kernels or KernelTable(device=device)
        self._stages, self._device, self._allocate = stages, device, allocate
        self._owned: dict[str, Owned] = {}
        self._members: dict[str, tuple[Tensor | Within, ...]] = {}
        self._side = SideStream(device, priority=FIRST)
        self._rooms: dict[bool, list[_Room]] = {}
        """Whether they are for layers → the buffers."""
        self._staging: Tensor | None = None
        self._zeroed: dict[str, torch.cuda.Event | None] = {}
        """Key that is here → not None: the compute stream does not wait for its zeros yet."""
        self._reduced: torch.cuda.Event | None = None
        self._first = self._last = True
        self._continued = False
        """Whether the piece that stays has sums that are not yet reduced."""
        self._onto = False
        """Whether its shard has earlier sums, to which those in the buffer are added."""
        self._deferred: list[str] = []
        """The pieces that the next micro-step reduces."""
        self._begins = False
        """Whether no sums have been asked for in this micro-step."""

    @property
    def staying(self) -> str | None:
        """The piece that is reduced in the last micro-step of an optimizer step alone, if there is one."""
        others = [piece for piece in self._owned if not _is_layer(piece) and not self._sends_rows(piece)]
        return others[0] if self.later and len(others) == 1 else None

    @property
    def _released_last(self) -> list[str]:
        """The pieces that are reduced beside the next forward."""
        return [piece for piece in LAST if piece in self._owned and piece != self.staying] if self.later else []

    def _sends_rows(self, piece: str) -> bool:
        """Whether ranks exchange the piece's rows."""
        return piece == EMBED and self.rows is not None

    def put_owned(self, piece: str, owned: Owned) -> None:
        """Keep this rank's part of a piece's range of sums."""
        self._owned[piece] = owned
        self._rooms.clear()

    def put(self, key: str, tensors: Sequence[Tensor | Within]) -> None:
        """The sums of a piece's trained tensors, in order: places in sharded ranges, or whole sums, which this store
        passes on.
        """
        self._members[key] = tuple(tensors)

    def written(self, key: str) -> list[bool]:
        """For each of the key's tensors, whether its contents do not count when the backward begins."""
        writes = self._writes and _is_layer(key)
        return [writes and isinstance(member, Within) for member in self._members[key]]

    def begin(self, *, first: bool, last: bool) -> None:
        """A micro-step begins. After the first one of an optimizer step a shard has its sums alone."""
        self._first, self._last = first, last
        if self.staying is not None and (first or not self._continued):
            self._onto = not first
            self._leave(self.staying)
        self._begins = True
        if first:
            for piece in self._deferred:  # of a warm-up, or of a step that has failed
                self._leave(piece)
            self._deferred.clear()

    def _leave(self, piece: str) -> None:
        """Free the piece's buffer, if it has one."""
        room = self._room_of(piece)
        if room is not None:
            room.piece = None

    def _reduce_deferred(self) -> None:
        """Reduce what the micro-step before has left. By now the gathers of this one's forward are launched, if there
        are any: the computation waits for those, and not for this.
        """
        self._begins = False
        deferred, self._deferred = self._deferred, []
        for piece in deferred:
            self._reduce(piece, onto=True)
        if self._first and not self._last:
            # The sums of this micro-step are added in the next one, which does not know whether there are earlier ones.
            with self._side.after_compute():
                for piece in self._released_last:
                    self._owned[piece].shard.zero_()
            self._reduced = self._side.done()

    def prefetch(self, key: str) -> None:
        """Make zeros for the key's sums."""
        if self._begins:
            self._reduce_deferred()
        if key in self._zeroed or self._sends_rows(key):
            return
        pieces = {member.piece for member in self._members[key] if isinstance(member, Within)}
        rooms = [self._enter(piece) for piece in sorted(pieces) if self._room_of(piece) is None]
        event = None
        if rooms:
            with self._side.after_compute():
                for room, elements in rooms:
                    for start, stop in self._zeros_of(key, elements):
                        room.buffer[start:stop].zero_()
            event = self._side.done()
        self._zeroed[key] = event

    def _zeros_of(self, key: str, elements: int) -> list[tuple[int, int]]:
        """The ranges of the key's sums that start from zeros: all of them, or the gaps between written tensors."""
        if not any(self.written(key)):
            return [(0, elements)]
        members = [member for member in self._members[key] if isinstance(member, Within)]
        ends = sorted((member.offset, member.offset + math.prod(member.shape)) for member in members)
        gaps = zip([0, *(stop for _, stop in ends)], [*(start for start, _ in ends), elements], strict=True)
        return [(start, stop) for start, stop in gaps if start < stop]

    def _room_of(self, piece: str) -> _Room | None:
        """The buffer that has the piece's sums."""
        return next((room for room in self._rooms_for(piece) if room.piece == piece), None)

    def _rooms_for(self, piece: str) -> list[_Room]:
        if not self._rooms:
            summed = {piece: owned for piece, owned in self._owned.items() if not self._sends_rows(piece)}
            for layers, count in ((True, 2), (False, 1)):
                sizes = [owned.elements for piece, owned in summed.items() if _is_layer(piece) == layers]
                buffers = [torch.empty(max(sizes, default=0), device=self._device) for _ in range(count)]
                self._rooms[layers] = [_Room(buffer) for buffer in buffers]
            longest = max(owned.longest for owned in summed.values())
            self._staging = self._allocate(self._stages.staging_elements(longest), torch.float32, self._device)
        return self._rooms[_is_layer(piece)]

    def _enter(self, piece: str) -> tuple[_Room, int]:
        """A buffer for the piece, in use from here on, and the number of its elements."""
        room = next((room for room in self._rooms_for(piece) if room.piece is None), None)
        assert room is not None, f"no buffer is free for the gradient sums of {piece}"
        room.piece = piece
        return room, self._owned[piece].elements

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """The sums to which the piece's backward adds; none if it adds to `rows`."""
        self.prefetch(key)
        if self._sends_rows(key):
            return ()
        self._side.join(self._zeroed[key])
        self._zeroed[key] = None
        return tuple(member if isinstance(member, Tensor) else self._view(member) for member in self._members[key])

    def _view(self, place: Within) -> Tensor:
        room = self._room_of(place.piece)
        assert room is not None
        return room.buffer[place.offset : place.offset + math.prod(place.shape)].view(place.shape)

    def release(self, key: str) -> None:
        """Start to add the sums of the piece's range over the ranks, into the shard."""
        if self._sends_rows(key):
            self._end(key)
            return
        self._side.join(self._zeroed.pop(key))
        if key not in self._owned or self._room_of(key) is None:
            return
        if key == self.staying:
            self._continued = not self._last
            if not self._continued:
                self._reduce(key, onto=self._onto)
        else:
            self._end(key)

    def _end(self, piece: str) -> None:
        """Reduce the piece, now or in the next micro-step."""
        if not self._last and piece in self._released_last:
            self._deferred.append(piece)
        else:
            self._reduce(piece, onto=not self._first)

    def _reduce(self, piece: str, *, onto: bool) -> None:
        """Start to add the sums of the piece's range over the ranks. `onto`: to those that the shard has."""
        if self._sends_rows(piece):
            self._add_rows(onto=onto)
            return
        room, owned, staging = self._room_of(piece), self._owned[piece], self._staging
        assert room is not None
        assert staging is not None
        with self._side.after_compute(), using(self._kernels):
            self._stages.reduce(
                room.buffer[: owned.elements],
                owned.longest,
                staging,
                out=owned.shard,
                onto=onto,
                everywhere=self._everywhere,
            )
        # The next piece's backward waits for the side stream, so no event is needed.
        room.piece = None
        self._reduced = self._side.done()

    def _add_rows(self, *, onto: bool) -> None:
        """Start to add the rows of all ranks. `onto`: to what the shard has."""
        assert self.rows is not None
        with self._side.after_compute():
            self.rows.add(onto=onto)
        self._reduced = self._side.done()

    def finish(self) -> None:
        """Later work of the compute stream finds the sums in the shards."""
        self._side.join(self._reduced)
        self._reduced = None
        if self.rows is not None:
            self.rows.finish()

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held on the device: shards and buffers."""
        buffers = [room.buffer for rooms in self._rooms.values() for room in rooms]
        buffers += [self._staging] if self._staging is not None else []
        tensors = [*buffers, *(owned.shard for owned in self._owned.values())]
        tensors += self.rows.buffers if self.rows is not None else ()
        return {"device": sum(t.nbytes for t in tensors), "host": 0, "disk": 0}


def _is_layer(piece: str) -> bool:
    return piece not in (EMBED, HEAD)
