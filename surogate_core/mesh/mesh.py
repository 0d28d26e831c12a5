"""The ranks of a run as one of them sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.errors import MachineError
from surogate_core.mesh.lifeline import Lifeline

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from surogate_core.bundles.fabrics import Fabric
    from surogate_core.mesh.peers import PeerMemory


_OVER = "the run is over"
CONNECTING_SECONDS = 300.0
"""The time in which the collectives of ranks that are all there open and work once."""


class CalledOff(Exception):  # noqa: N818
    """Rank 0 has ended the run before its first step."""


class Later:
    """The fabric of a mesh that will be connected before it is used."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh

    @property
    def rank(self) -> int:
        """As `Fabric.rank`."""
        return self._mesh.rank

    @property
    def world(self) -> int:
        """As `Fabric.world`."""
        return self._mesh.world

    def _now(self) -> Fabric:
        assert self._mesh.fabric is not None, "the ranks are connected before the first collective"
        return self._mesh.fabric

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """As `Fabric.exchange`."""
        self._now().exchange(parts, received_NK)

    def gather(self, parts: Sequence[Tensor]) -> None:
        """As `Fabric.gather`."""
        self._now().gather(parts)

    def add(self, values: Tensor) -> None:
        """As `Fabric.add`."""
        self._now().add(values)

    def maximum(self, values: Tensor) -> None:
        """As `Fabric.maximum`."""
        self._now().maximum(values)

    def largest(self, values: Sequence[float]) -> list[float]:
        """As `Fabric.largest`."""
        return self._now().largest(values)

    def close(self) -> None:
        """As `Fabric.close`."""
        self._now().close()


@dataclass(slots=True, kw_only=True)
class Mesh:
    """One rank of a run: its number, and how it talks to the others on the host.

    Before `connect` the ranks share only a key-value store: whoever prepares something for the others says so there,
    and nothing that waits has a time-out. After it they have collectives.
    """

    rank: int = 0
    world: int = 1
    store: dist.Store | None = None
    """None where there is one rank."""
    fabric: Fabric | None = None
    """Collectives on tensors of the compute device; None before `connect`, and where there is one rank."""
    local_world: int = 1
    """Ranks on this machine."""
    swap: Callable[[Any], list[Any]] | None = field(default=None, repr=False)
    """`gather` of ranks that have no store, because they are threads of one process."""
    turn: AbstractContextManager[Any] = field(default_factory=nullcontext, repr=False)
    """A lock of such ranks: tracing is not safe in two threads."""
    lifeline: Lifeline = field(default_factory=Lifeline)
    """Where this rank reports progress, and hears that another one has failed."""
    note: str = ""
    """What the user should know of the connection; empty if nothing."""
    _gathered: int = field(default=0, repr=False)
    _peer_memory: PeerMemory | None = field(default=None, repr=False)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which owns the outputs and takes the decisions."""
        return self.rank == 0

    def tell(self, event: str) -> None:
        """Say to all ranks that something is ready."""
        if self.store is not None:
            self.store.set(f"event {event}", "1")

    def wait_for(self, event: str) -> None:
        """Wait until some rank has told of the event, however long it takes."""
        self._wait(f"event {event}", 0.02)

    @contextmanager
    def first(self, event: str) -> Iterator[None]:
        """Rank 0 does the work inside before the others, such as a compilation whose result is cached."""
        if not self.leads:
            self.wait_for(event)
        with self.turn:
            yield
        if self.leads:
            self.tell(event)

    def call_off(self) -> None:
        """Rank 0 ends the run while the others wait for it: they get `CalledOff`."""
        self.tell(_OVER)

    def _wait(self, key: str, seconds: float) -> None:
        while self.store is not None and not self.store.check([key]):
            if self.store.check([f"event {_OVER}"]):
                raise CalledOff
            time.sleep(seconds)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank: JSON values. Before or after `connect`."""
        if self.swap is not None:
            return self.swap(value)
        if self.store is None:
            return [value]
        self._gathered += 1
        self.store.set(f"gather {self._gathered} {self.rank}", json.dumps(value))
        found = []
        for rank in range(self.world):
            key = f"gather {self._gathered} {rank}"
            self._wait(key, 0.002)
            found.append(json.loads(self.store.get(key)))
        return found

    def connect(self, device: torch.device) -> None:
        """Open the collectives. All ranks call it; none waits for unbounded work before the others are here."""
        if self.store is None or self.fabric is not None:
            return
        from surogate_core.mesh.groups import GroupFabric

        self.gather(None)  # all are here: from now on, a long wait is a fault
        self.lifeline.hurry(CONNECTING_SECONDS)
        self.fabric = GroupFabric.connect(self.store, rank=self.rank, world=self.world, device=device)
        self.lifeline.rest()
        if self._peer_memory is None:
            return
        from surogate_core.mesh.peers import PeerFabric

        try:
            self._peer_memory.share()
            self.fabric = PeerFabric(device, self._peer_memory)
        except MachineError as error:
            self.note = f"The GPUs cannot write into each other's memory, so NCCL moves all data, slower: {error}"

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[elements] zeros that the fabric moves as fast as it can. All ranks allocate alike, in the same order."""
        import torch

        shared = self.store is not None and self.world == self.local_world and not self.note
        if device.type != "cuda" or not shared or not elements:
            return torch.zeros(elements, dtype=dtype, device=device)
        if self._peer_memory is None:
            from surogate_core.mesh.peers import PeerMemory

            self._peer_memory = PeerMemory(device, rank=self.rank, gather=self.gather)
        return self._peer_memory.zeros(elements, dtype)

    @property
    def memory(self) -> int:
        """Bytes of GPU memory that `zeros` allocated beside torch's allocator."""
        return 0 if self._peer_memory is None else self._peer_memory.nbytes

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over the ranks, on the host; needs `connect`."""
        return list(values) if self.fabric is None else self.fabric.largest(values)

    def close(self) -> None:
        """End the collectives."""
        if self._peer_memory is not None:
            self._peer_memory.close()
        if self.fabric is not None:
            self.fabric.close()
            self.fabric = None
