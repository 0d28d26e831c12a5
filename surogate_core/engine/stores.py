"""The store that keeps tensors on the compute device; offloaders have others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from surogate_core.bundles import GradientStore, OffloaderSpec, Store, Stores, TensorKind

if TYPE_CHECKING:
    from torch import Tensor


class DeviceStore(Store):
    """Tensors stay on the device; fetching costs nothing.

    Residuals are dropped when released, all other tensors stay.
    """

    def __init__(self, kind: TensorKind):
        self.kind = kind
        self._held: dict[str, tuple[Tensor, ...]] = {}

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Take the tensors over, replacing those of the key."""
        self._held[key] = tuple(tensors)

    def prefetch(self, key: str) -> None:
        """Nothing to do: the tensors are on the device."""

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """The key's tensors."""
        return self._held[key]

    def release(self, key: str) -> None:
        """Drop residuals."""
        if self.kind == "residuals":
            self._held.pop(key, None)

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held, each storage counted once."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for h in self._held.values() for t in h
        }
        return {"device": sum(storages.values()), "host": 0, "disk": 0}


class ExpertsApart(Store):
    """Weights of which the frozen experts are in another store than the rest."""

    def __init__(self, rest: Store, experts: Store, places: Mapping[str, Sequence[int]]):
        """`places`: key → the places of the experts' weights among its tensors, in order."""
        self._rest, self._experts = rest, experts
        self._places = {key: of for key, of in places.items() if of}

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Take the tensors over."""
        places = self._places.get(key, ())
        self._rest.put(key, [t for i, t in enumerate(tensors) if i not in places])
        if places:
            self._experts.put(key, [tensors[i] for i in places])

    def begin_pass(self) -> None:
        """A pass over the pieces begins."""
        self._rest.begin_pass()
        self._experts.begin_pass()

    def prefetch(self, key: str) -> None:
        """Start the copies to the device."""
        self._rest.prefetch(key)
        if key in self._places:
            self._experts.prefetch(key)

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """The key's tensors in the order in which they were put."""
        found = list(self._rest.fetch(key))
        if key in self._places:
            for place, tensor in zip(self._places[key], self._experts.fetch(key), strict=True):
                found.insert(place, tensor)
        return tuple(found)

    def release(self, key: str) -> None:
        """Free the copies on the device."""
        self._rest.release(key)
        if key in self._places:
            self._experts.release(key)

    def nbytes(self) -> Mapping[Literal["device", "host", "disk"], int]:
        """Bytes held by both, by place."""
        both = self._rest.nbytes(), self._experts.nbytes()
        return {place: sum(held[place] for held in both) for place in both[0]}


class DeviceGradients(DeviceStore, GradientStore):
    """Sums that stay on the device; the engine clears at once all that no backward writes."""

    def __init__(self, written: Collection[str] = ()):
        """`written`: the keys whose sums the first micro-step of an optimizer step writes."""
        super().__init__("gradients")
        self.written_first, self._first = written, True

    def begin(self, *, first: bool, last: bool) -> None:
        """A micro-step begins. If it is the first, all sums are zeros but for those that it writes."""
        self._first = first

    def written(self, key: str) -> Sequence[bool]:
        """All of a key's tensors or none."""
        return [self._first and key in self.written_first] * len(self._held[key])

    def finish(self) -> None:
        """Nothing to do: the sums stay in place."""


class DeviceStores(Stores):
    """Everything stays on the compute device."""

    def store(self, kind: TensorKind) -> DeviceStore:
        """The store of a kind."""
        return DeviceGradients() if kind == "gradients" else DeviceStore(kind)


NO_OFFLOAD = OffloaderSpec(
    name="none",
    kinds=frozenset({"weights", "residuals", "gradients", "master", "optimizer"}),
    place="device",
    build=lambda options, directory, device: DeviceStores(),
)
"""Everything stays on the compute device."""
