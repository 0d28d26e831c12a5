"""What rank 0 sends through the store: in order, a few chunks at a time, and nothing is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from stores import tcp_meshes

from surogate_core.mesh import parcels
from surogate_core.mesh.mesh import CalledOff

CHUNKS = [bytes([number]) * (1 + number) for number in range(11)]


def test_every_receiver_gets_all_chunks_and_the_store_none() -> None:
    most = 0

    def chunks() -> Iterator[bytes]:
        nonlocal most
        for chunk in CHUNKS:
            yield chunk
            most = max(most, sum(store.check([f"parcel {number}"]) for number in range(len(CHUNKS))))

    with tcp_meshes(3) as meshes, ThreadPoolExecutor(3) as pool:
        first, *others = meshes
        assert first.store is not None
        store = first.store
        before = store.num_keys()
        for _ in range(2):  # the second time under the same names
            found = [pool.submit(list, islice(parcels.received(mesh), len(CHUNKS))) for mesh in others]
            parcels.send(first, chunks(), [1, 2])
            assert [one.result(60) for one in found] == [CHUNKS, CHUNKS]
            assert store.num_keys() == before
    assert 0 < most <= parcels.WINDOW


def test_a_chunk_may_have_its_full_size() -> None:
    chunk = bytes(range(256)) * (parcels.CHUNK // 256)
    with tcp_meshes(2) as (first, second), ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: next(parcels.received(second)))
        parcels.send(first, [chunk], [1])
        assert found.result(60) == chunk


def test_the_end_of_the_run_ends_both_sides() -> None:
    with tcp_meshes(2) as (first, second):
        second.call_off()
        with pytest.raises(CalledOff):
            parcels.send(first, CHUNKS, [1])
        assert list(islice(parcels.received(second), 4)) == CHUNKS[:4]
    with tcp_meshes(2) as (first, second):
        first.call_off()
        with pytest.raises(CalledOff):
            next(parcels.received(second))
