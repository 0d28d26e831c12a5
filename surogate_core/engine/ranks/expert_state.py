"""What ranks that share out experts keep of them, in the form in which one rank alone keeps it.

Checkpoints have experts by their numbers among all, and the optimizer's state in the order of one rank's flat groups.
So a run resumes with any number of ranks that share experts out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from surogate_core.bundles import FLAT_ALIGNMENT, Optimizer, ParamGroup
from surogate_core.engine.flat_groups import FlatGroups, FlatMember
from surogate_core.engine.ranks.orders import Orders
from surogate_core.engine.ranks.sharded_state import ShardedState
from surogate_core.engine.ranks.sharding import Sharing, chunks, gathered_range
from surogate_core.engine.ranks.stages import Stages
from surogate_core.errors import UserError
from surogate_core.files.tensorfile import Deferred, read_elements

LARGE = 2**20
"""Elements of a tensor from which on a part of it says how much state it has."""
Build = Callable[[Sequence[ParamGroup]], Optimizer]


@dataclass(frozen=True, slots=True)
class _Part:
    """The elements of a state tensor that are a trained tensor's."""

    member: FlatMember
    own: int
    """The first one in this rank's state tensor."""
    whole: int
    """The first one in that of one rank."""
    count: int
    """How many this rank has."""
    padding: int
    """Zeros behind those of all experts."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """A state tensor as one rank has it: that of each trained tensor, in the order of the flat group."""

    parts: tuple[_Part, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class ExpertState:
    """The trained tensors of experts that this rank has, and the optimizer's state, for checkpoints of all of them."""

    def __init__(
        self,
        flat: FlatGroups,
        build: Build,
        state: Mapping[str, Tensor],
        sharing: Sharing,
        orders: Orders,
        sharded: ShardedState | None,
    ):
        """`build`: makes an optimizer. `state`: the live state of the run's. `sharded`: that of the group which ranks
        share out otherwise. Raises `UserError` for state that cannot be put together.
        """
        along = sharing.along["expert"]
        self._flat, self._build, self._orders, self._sharded, self._state = flat, build, orders, sharded, state
        self._stages, self._size, self._place = Stages.over(along), along.world, along.rank
        self._known: dict[tuple[object, ...], dict[str, int]] = {}
        self.masters = {name: self._master(name) for group in flat.of_experts for name in group.shapes}
        """HF name → the masters of all experts, which rank 0 reads while the others serve."""
        self._single = {name: tensor for name, tensor in state.items() if self._group_of(name) is None}
        """The state that is not of trained tensors."""
        self._wholes = {name: self._whole(name) for name in self._names()}
        self._deferred = {name: self._defer(name, whole) for name, whole in self._wholes.items()}

    # ----------------------------------------------------------------------------- masters

    def _master(self, name: str) -> Deferred:
        own = self._flat.master[name]
        shape = (own.shape[0] * self._size, *own.shape[1:])
        return self._orders.deferred(shape, own.dtype, self._gathers(own))

    def _gathers(self, own: Tensor) -> Sequence[Callable[[], Tensor]]:
        """Works that gather this part of all ranks that share out experts, in pieces."""
        count, like = own.numel(), own.new_empty(0)
        owners = [(number * count, (number + 1) * count) for number in range(self._size)]
        spans = chunks(0, count * self._size)
        return [partial(gathered_range, self._stages, own.reshape(-1), owners, span, like=like) for span in spans]

    def read_master(self, name: str, file: Mapping[str, Tensor]) -> None:
        """Read this rank's experts of a tensor."""
        own = self._flat.master[name]
        read_elements(file, name, self._place * own.numel(), own)

    # ------------------------------------------------------------------- optimizer's state

    def _group_of(self, name: str) -> ParamGroup | None:
        """The group after which a state tensor is named. Raises `UserError` for a name that only contains one."""
        groups = self._flat.groups
        found = next((group for group in groups if name.startswith(f"{group.name}.")), None)
        if found is None and any(group.name in name for group in groups):
            raise UserError(
                f"ep_size: the optimizer's state {name!r} is not named after a group of trained tensors, so that a "
                f"checkpoint of GPUs that share out experts would lose a part of it. Fix: ep_size=1, or optimizer=adamw"
            )
        return found

    def _names(self) -> list[str]:
        """The names that state tensors have on one rank."""
        found = dict.fromkeys(self._sharded.names if self._sharded is not None else ())
        for name in self._state:
            group = self._group_of(name)
            if group is not None and "@" not in group.name:  # those of parts are of `ShardedState`
                found[f"{self._flat.name_on_one_rank(group.name)}{name[len(group.name) :]}"] = None
        return list(found)

    def _elements_of(self, member: FlatMember, suffix: str) -> int:
        """Elements of the state tensor of a group that are a trained tensor's, as an optimizer of it alone says."""
        key = (member.group, member.shape, member.whole, member.hidden)
        if key not in self._known:
            shape, times = _sample(member.shape)
            elements = -(-math.prod(shape) // FLAT_ALIGNMENT) * FLAT_ALIGNMENT
            like = next(group for group in self._flat.groups if group.name.partition("@")[0] == member.group)
            alone = replace(
                like,
                name=member.group,
                master=torch.empty(elements, dtype=like.master.dtype),
                grad=torch.empty(elements),
                shapes={member.name: (0, shape)},
                sizes={member.name: member.whole},
                hidden=frozenset({member.name}) if member.hidden else frozenset(),
            )
            state = self._build([alone]).state()
            first = f"{member.group}."
            self._known[key] = {
                n.removeprefix(first): times * t.numel() for n, t in state.items() if n.startswith(first)
            }
        return self._known[key].get(suffix, 0)

    def _whole(self, name: str) -> _Whole:
        base, suffix = name.split(".", 1)
        found, whole = list[_Part](), 0
        own: dict[str, int] = {}
        for member in self._flat.order_on_one_rank(base):
            count, padding = self._elements_of(member, suffix), 0
            at = own.get(member.group, 0)
            own[member.group] = at + count
            if member.of_experts:
                elements = math.prod(member.shape)
                if count and elements % FLAT_ALIGNMENT:
                    count, padding = self._without_padding(name, member, count)
            found.append(_Part(member, at, whole, count, padding))
            whole += count * (self._size if member.of_experts else 1) + padding
        forms = {group: form for group in own if (form := self._form(name, group)) is not None}
        if any(own[group] != rows * math.prod(tail) for group, (rows, tail, _) in forms.items()):
            raise UserError(
                f"ep_size: the optimizer's state {name!r} does not list the trained tensors one after another, so "
                f"that a checkpoint of GPUs that share out experts would lose a part of it. "
                f"Fix: ep_size=1, or optimizer=adamw"
            )
        _, tail, dtype = next(iter(forms.values()))
        return _Whole(tuple(found), (whole // math.prod(tail), *tail), dtype)

    def _form(self, name: str, group: str) -> tuple[int, tuple[int, ...], torch.dtype] | None:
        """(rows, shape of a row, dtype) of what this rank, or those of a shared group, has of a state tensor."""
        if self._is_sharded(group):
            return self._sharded.form(name) if self._sharded and name in self._sharded.names else None
        state = self._state.get(f"{group}.{name.split('.', 1)[1]}")
        return None if state is None else (len(state), tuple(state.shape[1:]), state.dtype)

    def _without_padding(self, name: str, member: FlatMember, count: int) -> tuple[int, int]:
        """(elements of a rank's experts, zeros behind those of all), of a tensor that padding follows."""
        elements = math.prod(member.shape)
        if count != -(-elements // FLAT_ALIGNMENT) * FLAT_ALIGNMENT:
            raise UserError(
                f"ep_size: a GPU has {elements} elements of {member.name}, no multiple of {FLAT_ALIGNMENT}, and the "
                f"optimizer's state {name!r} is of blocks. Fix: ep_size=1, or optimizer=adamw"
            )
        return elements, -elements * self._size % FLAT_ALIGNMENT

    def _is_sharded(self, group: str) -> bool:
        return self._flat.sharded is not None and self._flat.sharded.name == group

    def _own(self, name: str, part: _Part) -> Tensor:
        """This rank's state of a trained tensor, flat."""
        state = self._state[f"{part.member.group}.{name.split('.', 1)[1]}"]
        return state.view(-1)[part.own : part.own + part.count]

    def _defer(self, name: str, whole: _Whole) -> Deferred:
        works = [work for part in whole.parts if part.count for work in self._works(name, whole, part)]
        return self._orders.deferred(whole.shape, whole.dtype, works)

    def _works(self, name: str, whole: _Whole, part: _Part) -> Sequence[Callable[[], Tensor]]:
        if self._is_sharded(part.member.group):
            assert self._sharded is not None
            width = math.prod(whole.shape[1:])
            return self._sharded.works(name, part.own // width, (part.own + part.count) // width)
        own = self._own(name, part)
        if not part.member.of_experts:
            return [partial(own.clone)]
        zeros = partial(torch.zeros, part.padding, dtype=whole.dtype)
        return [*self._gathers(own), *([zeros] if part.padding else [])]

    def tensors(self) -> dict[str, Tensor | Deferred]:
        """All of the optimizer's state by the names that it has on one rank."""
        return {**self._single, **self._deferred}

    def read(self, file: Mapping[str, Tensor]) -> None:
        """Read this rank's part of the optimizer's state."""
        for name, tensor in self._single.items():
            tensor.copy_(file[name])
        for name, whole in self._wholes.items():
            apart = [part for part in whole.parts if part.count and self._is_sharded(part.member.group)]
            for part in whole.parts:
                if part.count and not self._is_sharded(part.member.group):
                    place = self._place if part.member.of_experts else 0
                    read_elements(file, name, part.whole + part.count * place, self._own(name, part))
            if apart and self._sharded is not None:
                self._sharded.read_whole(name, partial(_read_apart, file, name, apart))


def _sample(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """A part of a large tensor, of whole blocks, and how often the tensor has it."""
    first, *rest = shape
    if math.prod(shape) <= LARGE:
        return shape, 1
    whole = (n for n in range(1, first + 1) if first % n == 0 and n * math.prod(rest) % FLAT_ALIGNMENT == 0)
    part = next(whole, first)
    return (part, *rest), first // part


def _read_apart(file: Mapping[str, Tensor], name: str, apart: Sequence[_Part], first: int, into: Tensor) -> None:
    """Read elements of a state tensor without experts, from number `first` on, from one that has them."""
    flat = into.view(-1)
    for part in apart:
        low, high = max(first, part.own), min(first + len(flat), part.own + part.count)
        if low < high:
            read_elements(file, name, part.whole + low - part.own, flat[low - first : high - first])
