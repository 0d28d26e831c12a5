"""Bytes that rank 0 sends to other ranks through their store, which holds a few chunks of them at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from surogate_core.mesh.mesh import Mesh

CHUNK = 4 * 2**20
"""Bytes of a chunk at most: a TCPStore closes the connection at more than 8 MiB."""
WINDOW = 4
"""Chunks that the store holds at most."""
POLL = 0.001


def send(mesh: Mesh, chunks: Iterable[bytes], to: Sequence[int]) -> None:
    """Send the chunks to the ranks `to`, each of which takes all of them from `received`.

    Returns when all were taken, and no chunk is left in the store. Raises `CalledOff` if the run ends meanwhile. After
    an error the run ends, and the store with it.
    """
    assert mesh.store is not None
    store, held = mesh.store, deque[int]()

    def taken() -> bool:
        return bool(store.add(_taken(held[0]), 0) >= len(to))

    def drop() -> None:
        mesh.until(taken, POLL)
        number = held.popleft()
        store.delete_key(_chunk(number))
        store.delete_key(_taken(number))

    for number, chunk in enumerate(chunks):
        assert len(chunk) <= CHUNK
        held.append(number)
        store.set(_chunk(number), cast("str", chunk))  # bytes too, which the stub does not say
        if len(held) == WINDOW:
            drop()
    while held:
        drop()


def received(mesh: Mesh) -> Iterator[bytes]:
    """The chunks that rank 0 sends to this rank, without end: the receiver knows how many it wants."""
    assert mesh.store is not None
    store = mesh.store
    for number in count():
        mesh.until(partial(store.check, [_chunk(number)]), POLL)
        chunk = store.get(_chunk(number))
        store.add(_taken(number), 1)
        yield chunk


def _chunk(number: int) -> str:
    return f"parcel {number}"


def _taken(number: int) -> str:
    return f"parcel {number} was taken"
