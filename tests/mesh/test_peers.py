"""Ranks that write into each other's memory: threads whose driver copies in this process's memory."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from surogate_core.bundles import Fabric, FabricContext
from surogate_core.errors import MachineError
from surogate_core.mesh import peers
from surogate_core.mesh.groups import GroupFabric
from surogate_core.mesh.peers import PeerFabric
from surogate_testing.virtual import VirtualFabric, in_threads

CPU = torch.device("cpu")
PATIENCE = 30.0


class FakeDriver:
    """`mesh.driver` on the memory of this process.

    As with a GPU, work is only put on a stream, and done later: each rank's stream is a thread of its own.
    """

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.maps = True
        self.attached = 0
        self.late = False
        self.streams: dict[int, ThreadPoolExecutor] = {}
        self._left: dict[int, list[Future[None]]] = {}
        self._lock = threading.Lock()

    def then(self, work: Callable[[], None], stream: int | None = None) -> None:
        """Put work on a stream, by default this rank's."""
        number = threading.get_ident() if stream is None else stream
        pool = self.streams.setdefault(number, ThreadPoolExecutor(1))
        self._left.setdefault(number, []).append(pool.submit(work))

    def finish(self) -> None:
        """Wait until the work of this rank's stream is done; raises its errors."""
        for work in self._left.pop(threading.get_ident(), []):
            work.result()

    def allocate(self, nbytes: int) -> int:
        block = ctypes.create_string_buffer(nbytes)
        self.blocks.append(block)
        return ctypes.addressof(block)

    def export(self, address: int) -> bytes:
        return address.to_bytes(8, "little")

    def attach(self, handle: bytes) -> int:
        if not self.maps and threading.current_thread().name.endswith("_1"):  # one of them
            raise MachineError("mapping another GPU's memory failed: CUDA error 217")
        with self._lock:
            self.attached += 1
        return int.from_bytes(handle, "little")

    def detach(self, address: int) -> None:
        pass

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        def work() -> None:
            time.sleep(random.random() * 1e-3)
            ctypes.memmove(to, source, nbytes)

        self.then(work, stream)

    def write_flag(self, address: int, value: int, stream: int) -> None:
        def work() -> None:
            ctypes.c_uint32.from_address(address).value = value

        self.then(work, stream)

    def wait_flag(self, address: int, value: int, stream: int) -> None:
        def work() -> None:
            end = time.monotonic() + PATIENCE
            while ctypes.c_uint32.from_address(address).value != value:
                if self.late or time.monotonic() > end:
                    self.late = True
                    raise AssertionError("a rank waits for ever")
                time.sleep(1e-5)

        self.then(work, stream)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver for threads, which torch takes for GPUs."""
    found = FakeDriver()
    monkeypatch.setattr(peers, "driver", found)
    monkeypatch.setattr(peers, "SMALLEST", 64)
    monkeypatch.setattr(
        peers, "_Bytes", lambda at, n: np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at), shape=(n,))
    )
    monkeypatch.setattr(GroupFabric, "connect", lambda self: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=threading.get_ident())
    )
    yield found
    for pool in found.streams.values():
        pool.shutdown()


def fabric_of(virtual: VirtualFabric, near: int = 0) -> PeerFabric:
    gather = virtual.mesh().gather
    context = FabricContext(
        rank=virtual.rank,
        world=virtual.world,
        near=near or virtual.world,
        device=CPU,
        store=dist.HashStore(),
        gather=gather,
    )
    return PeerFabric(context)


def zeros(fabric: PeerFabric, elements: int, dtype: torch.dtype) -> torch.Tensor:
    found = fabric.zeros(elements, dtype)
    assert found is not None
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_write_what_virtual_ranks_exchange(world: int, driver: FakeDriver) -> None:
    """Many times in a row, without a wait of the host: a rank neither writes too early nor reads too early."""
    lengths = [40 * (world - rank) for rank in range(world)]

    def work(virtual: VirtualFabric) -> None:
        random.seed(virtual.rank)
        fabric = fabric_of(virtual)
        received = zeros(fabric, world * 50, torch.float32).view(world, 50)
        by_rank = zeros(fabric, sum(lengths), torch.bfloat16).split(lengths)
        fabric.connect()
        own, columns = virtual.rank, torch.arange(50.0)
        sent = [torch.zeros(50) for _ in range(world)]

        def fill(turn: int) -> None:
            for rank, part in enumerate(sent):
                part.copy_(1000.0 * turn + 100 * own + 10 * rank + columns)
            by_rank[own].fill_(10 * turn + own)

        def check_received(turn: int) -> None:
            time.sleep(random.random() * 1e-3)
            for rank in range(world):
                expected = 1000.0 * turn + 100 * rank + 10 * own + columns
                assert rank == own or torch.equal(received[rank], expected), "written too early, or not yet"

        def check_gathered(turn: int) -> None:
            time.sleep(random.random() * 1e-3)
            assert [part.unique().tolist() for part in by_rank] == [[10 * turn + rank] for rank in range(world)]

        for turn in range(20):
            driver.then(partial(fill, turn))
            fabric.exchange(sent, received)
            driver.then(partial(check_received, turn))
        for turn in range(20):
            driver.then(partial(fill, turn))
            fabric.gather(by_rank)
            driver.then(partial(check_gathered, turn))
        driver.finish()
        # After the ranks are connected, as the stores' buffers. The last ranks own nothing.
        later = zeros(fabric, 128, torch.uint8).split([128, *[0] * (world - 1)])
        later[virtual.rank].fill_(7)
        fabric.gather(later)
        driver.finish()
        assert later[0].eq(7).all()
        assert fabric.memory == 4 * peers.GRANULE  # three tensors and the flags
        fabric.close()

    in_threads(world, work)


@pytest.fixture
def by_nccl(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, tuple[int, ...]]]:
    """(collective, ranks) of what copy engines leave to NCCL, which does nothing here."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    for name in ("exchange", "gather"):
        monkeypatch.setattr(GroupFabric, name, lambda self, *given, name=name: found.add((name, tuple(self._ranks))))
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: object())
    monkeypatch.setattr(dist, "all_reduce", lambda values, op=None, group=None: None)
    return found


def rows_from(group: Fabric, rank: int, received: torch.Tensor, driver: FakeDriver) -> tuple[list[float], list[float]]:
    """What arrives from each member of a group by `exchange` and by `gather`. `rank`: this one's in the whole run."""
    received.fill_(-1.0)
    own = torch.full((received.shape[1],), 1.0 + rank)  # lives until it is copied
    group.exchange([own] * group.world, received)
    driver.finish()
    exchanged = [row.mean().item() for row in received]
    received.fill_(-1.0)
    received[group.rank].fill_(1.0 + rank)
    group.gather(list(received))
    driver.finish()
    return exchanged, [row.mean().item() for row in received]


@pytest.mark.parametrize("near", [2, 4])
def test_groups_of_one_machine_write_and_others_use_nccl(
    near: int, driver: FakeDriver, by_nccl: set[tuple[str, tuple[int, ...]]]
) -> None:
    """Four ranks on two machines, and on one."""

    def work(virtual: VirtualFabric) -> None:
        fabric = fabric_of(virtual, near)
        rows = {size: zeros(fabric, size * 50, torch.float32).view(size, 50) for size in (2, 4)}
        fabric.connect()
        inside, across = fabric.within(2), fabric.across(2)
        assert (inside.rank, inside.world) == (virtual.rank % 2, 2)
        rank = virtual.rank
        members = {inside: [rank // 2 * 2, rank // 2 * 2 + 1], across: [rank % 2, rank % 2 + 2], fabric: [0, 1, 2, 3]}
        for group, ranks in members.items():
            arrives = group is inside or near == 4
            expected = [1.0 + r if arrives or r == rank else -1.0 for r in ranks]
            exchanged, gathered = rows_from(group, rank, rows[group.world], driver)
            assert gathered == expected
            del exchanged[group.rank], expected[group.rank]  # what is in the own row is undefined
            assert exchanged == expected
        fabric.close()

    in_threads(4, work)
    far = {(name, ranks) for name in ("exchange", "gather") for ranks in ((0, 2), (1, 3), (0, 1, 2, 3))}
    assert by_nccl == (far if near == 2 else set())
    # Each of four ranks maps two buffers and its flags, of the others of its machine.
    assert driver.attached == (4 * 1 * 3 if near == 2 else 4 * 3 * 5)


def test_if_one_group_leaves_its_machine_nccl_serves_all(
    driver: FakeDriver, by_nccl: set[tuple[str, tuple[int, ...]]]
) -> None:
    """Groups of two on two machines of three: all ranks allocate alike, so all have flags or none has."""

    def work(virtual: VirtualFabric) -> None:
        fabric = fabric_of(virtual, near=3)
        received = zeros(fabric, 100, torch.float32).view(2, 50)
        fabric.connect()
        exchanged, _ = rows_from(fabric.within(2), virtual.rank, received, driver)
        assert exchanged == [-1.0, -1.0]
        fabric.close()

    in_threads(6, work)
    assert by_nccl == {(name, ranks) for name in ("exchange", "gather") for ranks in ((0, 1), (2, 3), (4, 5))}


def test_bytes_of_other_memory_go_by_nccl(driver: FakeDriver, by_nccl: set[tuple[str, tuple[int, ...]]]) -> None:
    """As those of `Mesh.gather_bytes`."""

    def work(virtual: VirtualFabric) -> None:
        fabric = fabric_of(virtual)
        zeros(fabric, 1000, torch.float32)
        fabric.connect()
        for group in (fabric, fabric.within(2)):
            rows = torch.zeros(group.world, 5000, dtype=torch.uint8)
            group.exchange(list(rows.unbind()), torch.empty_like(rows))
            group.gather(list(rows.unbind()))
        fabric.close()

    in_threads(4, work)
    groups = ((0, 1, 2, 3), (0, 1), (2, 3))
    assert by_nccl == {(name, ranks) for name in ("exchange", "gather") for ranks in groups}


def test_if_one_rank_cannot_all_hear_of_it(driver: FakeDriver) -> None:
    driver.maps = False

    def work(virtual: VirtualFabric) -> None:
        fabric = fabric_of(virtual)
        zeros(fabric, 8, torch.float32)
        with pytest.raises(MachineError, match=r"cannot write into each other's memory: rank 1: .* CUDA error 217"):
            fabric.connect()

    in_threads(3, work)
