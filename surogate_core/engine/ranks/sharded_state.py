"""The state of an optimizer whose groups several ranks share out, as a checkpoint has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from surogate_core.engine.ranks.orders import Orders
from surogate_core.engine.ranks.sharding import Range, ShardedGroup, chunks, gathered_range
from surogate_core.engine.ranks.stages import Stages
from surogate_core.errors import PluginError
from surogate_core.files.tensorfile import Deferred, read_elements
from surogate_core.kernels.optimizing.rounding import PERIOD
from surogate_core.mesh.mesh import Mesh


def _check_names(state: Mapping[str, Tensor], groups: Collection[str]) -> None:
    """Raise `PluginError` for state from which the whole one could not be put together."""
    for name, tensor in state.items():
        if any(name.startswith(f"{group}.") for group in groups):
            if tensor.ndim:
                continue
            fault = "is one number for a group; name it without the group's name"
        elif any(group in name for group in groups):
            fault = "must begin with the group's name and a dot"
        else:
            continue
        raise PluginError(
            f"the optimizer's state {name!r} {fault}, or a checkpoint of several GPUs would lose a part of it "
            f"(docs/hooks.md). Fix: `whole_matrices=True` in its OptimizerSpec, or zero_level=0."
        )


class ShardedState:
    """An optimizer's state as one rank holds it, in the form in which one rank alone would.

    State tensors that are named after a group list its elements in order, so a whole one is those of the ranks' parts,
    piece by piece and rank by rank.
    """

    def __init__(self, group: ShardedGroup, state: Mapping[str, Tensor], mesh: Mesh, stages: Stages, orders: Orders):
        self._mesh, self._stages = mesh, stages
        names = {g.name for g in group.groups}
        # The numbers of a part's groups are those of the periods in which they are.
        places = [
            f"{group.name}@{part.key}.{number}"
            for part in group.parts.values()
            for number in range(-(-group.elements // PERIOD))
        ]
        self._places = places
        self._device = group.device
        _check_names(state, names)
        self._replicated = {name: t for name, t in state.items() if not any(name.startswith(f"{n}.") for n in names)}
        self._own: dict[str, dict[str, Tensor]] = {}
        """Name of a whole state tensor → name of a part's group → its tensor here."""
        for name, tensor in state.items():
            owner = next((n for n in names if name.startswith(f"{n}.")), None)
            if owner is not None:
                self._own.setdefault(group.name + name[len(owner) :], {})[owner] = tensor
        self._exchange_sizes(group)
        self._deferred = {name: self._defer(name, orders) for name in self._suffixes}

    def _exchange_sizes(self, group: ShardedGroup) -> None:
        """What parts of each state tensor each rank has: all ranks take part."""
        told = {
            name: {place: [len(t), *t.shape[1:]] for place, t in own.items()}
            | {"": [str(next(iter(own.values())).dtype)]}
            for name, own in self._own.items()
        }
        by_part = self._stages.by_part(self._mesh.gather(told))
        self._suffixes = sorted({name for told in by_part for name in told})
        self._rows: dict[str, list[list[int]]] = {}
        """Name → for each part's group, the rows of each owner."""
        self._tails: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in self._suffixes:
            some = next(told[name] for told in by_part if name in told)
            place = next(key for key in some if key)
            self._tails[name] = (tuple(some[place][1:]), getattr(torch, some[""][0].removeprefix("torch.")))
            self._rows[name] = [[told.get(name, {}).get(place, [0])[0] for told in by_part] for place in self._places]

    def _defer(self, name: str, orders: Orders) -> Deferred:
        rows, tail, dtype = self.form(name)
        return orders.deferred((rows, *tail), dtype, self.works(name, 0, rows))

    def form(self, name: str) -> tuple[int, tuple[int, ...], torch.dtype]:
        """(rows, shape of a row, dtype) of a whole state tensor."""
        return (sum(map(sum, self._rows[name])), *self._tails[name])

    def works(self, name: str, first: int, stop: int) -> list[Callable[[], Tensor]]:
        """Works that make the rows of a whole state tensor, from `first` to the one before `stop`, in pieces: all ranks
        do them together.
        """
        width, at = math.prod(self._tails[name][0]), 0
        found: list[Callable[[], Tensor]] = []
        for number, counts in enumerate(self._rows[name]):
            low, high = max(first, at), min(stop, at + sum(counts))
            if low < high:
                spans = chunks((low - at) * width, (high - at) * width)
                found += [partial(self._of_part, name, number, span) for span in spans]
            at += sum(counts)
        return found

    @property
    def names(self) -> Sequence[str]:
        """The names of the whole state tensors that ranks share out."""
        return self._suffixes

    def _of_part(self, name: str, number: int, span: Range) -> Tensor:
        """Some elements of a part's rows of all ranks; all take part."""
        tail, dtype = self._tails[name]
        width, counts = math.prod(tail), self._rows[name][number]
        borders = list(accumulate((count * width for count in counts), initial=0))
        like = torch.empty(0, dtype=dtype, device=self._device)
        own = self._own[name][self._places[number]].view(-1) if counts[self._stages.own] else like
        return gathered_range(self._stages, own, list(pairwise(borders)), span, like=like)

    def tensors(self) -> dict[str, Tensor | Deferred]:
        """All state by the names that it has on one rank."""
        return {**self._replicated, **self._deferred}

    def read(self, file: Mapping[str, Tensor]) -> None:
        """Read this rank's state from a checkpoint."""
        for name, tensor in self._replicated.items():
            tensor.copy_(file[name])
        for name in self._suffixes:
            self.read_whole(name, partial(read_elements, file, name))

    def read_whole(self, name: str, read: Callable[[int, Tensor], None]) -> None:
        """Read this rank's part of a whole state tensor. `read`: (first element, contiguous tensor) reads into it."""
        at, width, own = 0, math.prod(self._tails[name][0]), self._stages.own
        for place, counts in zip(self._places, self._rows[name], strict=True):
            if counts[own]:
                read((at + sum(counts[:own])) * width, self._own[name][place])
            at += sum(counts)
