"""The ranks of a run as one of them sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.tasks import Together
from surogate_core.mesh.delegate import Delegate
from surogate_core.mesh.lifeline import Lifeline

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from surogate_core.bundles.fabrics import Fabric, FabricContext, FabricSpec
    from surogate_core.mesh.axes import Axis


_OVER = "the run is over"
AT_ONCE = 64
"""Keys that a rank asks for in one request while it waits for them."""
CONNECTING_SECONDS = 300.0
"""The time in which the collectives of ranks that are all there open and work once."""


class CalledOff(Exception):  # noqa: N818
    """Rank 0 has ended the run before its first step."""


class Along(Delegate):
    """The fabric of this rank's group along an axis, of a mesh that will be connected before it is used."""

    def __init__(self, mesh: Mesh, axis: Axis):
        self._mesh, self._axis = mesh, axis
        self.rank, self.world = axis.place(mesh.rank), axis.size
        self._fabric: Fabric | None = None

    def connect(self) -> None:
        """Open it. All ranks of the mesh call it, after `Mesh.connect`."""
        assert self._mesh.fabric is not None, "the ranks are connected before their groups"
        self._fabric = self._axis.of(self._mesh.fabric)

    def _now(self) -> Fabric:
        assert self._fabric is not None, "the ranks are connected before the first collective"
        return self._fabric


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
    near: int = 0
    """As `FabricContext.near`; 0 also where it is not known yet."""
    node: int = 0
    """Ranks of each machine, if what goes between machines has a stage of its own; 0 treats all ranks alike."""
    swap: Callable[[Any], list[Any]] | None = field(default=None, repr=False)
    """`gather` of ranks that have no store, because they are threads of one process."""
    turn: AbstractContextManager[Any] = field(default_factory=nullcontext, repr=False)
    """A lock of such ranks: tracing is not safe in two threads."""
    lifeline: Lifeline = field(default_factory=Lifeline)
    """Where this rank reports progress, and hears that another one has failed."""
    _gathered: int = field(default=0, repr=False)
    _device: torch.device | None = field(default=None, repr=False)
    """The device whose tensors the fabric moves; None is the CPU."""
    _built: Fabric | None = field(default=None, repr=False)
    """The fabric before it is connected, which has memory already."""

    def __post_init__(self) -> None:
        if self.local_world == self.world:
            self.near = self.world

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
        self._wait([f"event {event}"], 0.02)

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

    def until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Wait until it holds, however long it takes, asking every `seconds`. Raises `CalledOff`."""
        while not holds():
            if self.store is not None and self.store.check([f"event {_OVER}"]):
                raise CalledOff
            time.sleep(seconds)

    def _wait(self, keys: list[str], seconds: float) -> None:
        if self.store is not None:
            self.until(partial(self.store.check, keys), seconds)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank: JSON values. Before or after `connect`."""
        if self.swap is not None:
            return self.swap(value)
        if self.store is None:
            return [value]
        self._gathered += 1
        self.store.set(f"gather {self._gathered} {self.rank}", json.dumps(value))
        keys = [f"gather {self._gathered} {rank}" for rank in range(self.world)]
        # N ranks that ask for each key by itself would send rank 0 2 · N² requests.
        for at in range(0, self.world, AT_ONCE):
            self._wait(keys[at : at + AT_ONCE], 0.002)
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def choose(
        self, build: Callable[[FabricContext], Fabric], device: torch.device, offers: Sequence[FabricSpec] = ()
    ) -> None:
        """Have `build` make the fabric, before anything else needs it; otherwise it is the core's `auto`.

        `offers`: the fabrics of all plugins. Raises what `build` raises. For ranks with a store.
        """
        import torch.distributed as dist

        from surogate_core.bundles.fabrics import FabricContext

        assert self.store is not None
        assert self._built is None
        self._built = build(
            FabricContext(
                rank=self.rank,
                world=self.world,
                near=self.near,
                device=device,
                store=dist.PrefixStore("fabric", self.store),
                gather=self.gather,
                offers=offers,
            )
        )

    def _fabric_on(self, device: torch.device) -> Fabric:
        """The fabric, connected or not."""
        if self._built is None:
            from surogate_core.bundles.options import NoOptions
            from surogate_core.mesh.offers import FABRICS, auto

            self.choose(partial(auto, NoOptions()), device, FABRICS)
        assert self._built is not None
        return self._built

    def connect(self, device: torch.device) -> None:
        """Open the collectives. All ranks call it; none waits for unbounded work before the others are here."""
        if self.store is None or self.fabric is not None:
            return
        found = self._fabric_on(device)
        self.gather(None)  # all are here: from now on, a long wait is a fault
        self.lifeline.hurry(CONNECTING_SECONDS)
        found.connect()
        self.lifeline.rest()
        self.fabric, self._device = found, device

    def zeros(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[elements] zeros that the fabric moves as fast as it can. All ranks allocate alike, in the same order."""
        import torch

        found = None
        if elements and device.type != "meta" and self.store is not None:
            found = (self.fabric or self._fabric_on(device)).zeros(elements, dtype)
        return torch.zeros(elements, dtype=dtype, device=device) if found is None else found

    @property
    def memory(self) -> int:
        """Bytes of the device's memory that `zeros` allocated beside torch's allocator."""
        found = self.fabric or self._built
        return 0 if found is None else found.memory

    @property
    def note(self) -> str:
        """What the user should know of the connection; empty if nothing."""
        return "" if self.fabric is None else self.fabric.note

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each value over the ranks, on the host; needs `connect`."""
        return list(values) if self.fabric is None else self.fabric.largest(values)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all ranks, by rank, through the collectives; needs `connect`. A rank waits for the slowest one.

        For what is too large for `gather`, or gathered again and again: a store keeps all that it was ever given.
        """
        if self.fabric is None:
            return [data]
        import torch

        mine = [0.0] * self.world
        mine[self.rank] = float(len(data))
        lengths = [int(length) for length in self.largest(mine)]
        rows = torch.zeros(self.world, max(*lengths, 1), dtype=torch.uint8, device=self._device)
        if data:
            rows[self.rank, : len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.fabric.gather(list(rows.unbind()))
        host = rows.cpu().numpy()
        return [host[rank, :length].tobytes() for rank, length in enumerate(lengths)]

    def together(self) -> Together:
        """The ranks as an online task sees them."""
        return Together(rank=self.rank, world=self.world, local_world=self.local_world, exchange=self.gather_bytes)

    def close(self) -> None:
        """End the collectives."""
        found = self.fabric or self._built
        if found is not None:
            found.close()
        self.fabric = self._built = None
