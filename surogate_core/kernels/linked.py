"""Ranks that work together inside traced programs, and the exchange between them.

A traced program knows its ranks by a number, because it may be compiled once and run by several ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.bundles.fabrics import Fabric

_fabrics: dict[int, Fabric] = {}
"""Number in the traced programs → the fabric of the ranks."""
_numbering = threading.Lock()
"""Ranks that are threads of one process take their numbers one after another."""


@dataclass(slots=True)
class Linked:
    """The ranks of a group, as traced programs know them."""

    size: int
    """C, ranks of the group."""
    number: int = -1
    """Key of their fabric; negative if programs are traced but never run."""

    def open(self, fabric: Fabric) -> None:
        """Take the ranks of a fabric, and the smallest free number, which is the same in all processes of a run: ranks
        find each other's compiled programs.
        """
        with _numbering:
            self.number = next(n for n in range(len(_fabrics) + 1) if n not in _fabrics)
            _fabrics[self.number] = fabric

    def close(self) -> None:
        """Free the number: programs that were traced with it never run again."""
        _fabrics.pop(self.number, None)


L = TypeVar("L", bound=Linked)
_active: ContextVar[Mapping[type[Linked], Linked] | None] = ContextVar("surogate_linked_ranks", default=None)


@contextmanager
def among(*groups: Linked) -> Iterator[None]:
    """Blocks that are traced inside work together with the ranks of these groups, one of each class."""
    token = _active.set({type(group): group for group in groups})
    try:
        yield
    finally:
        _active.reset(token)


def active(kind: type[L]) -> L | None:
    """The group of this class among whose ranks blocks are traced now."""
    found = (_active.get() or {}).get(kind)
    assert found is None or isinstance(found, kind)
    return found


def rank_in(number: int) -> int:
    """This rank's number in a group; for ops that traced programs call."""
    return _fabrics[number].rank


def exchanged(sent_C: Tensor, number: int, received: Tensor | None = None) -> Tensor:
    """[C, ...]: in row r what rank r sent to this one; row r of `sent_C` goes to rank r. `received`: room for it."""
    fabric = _fabrics[number]
    received = torch.empty_like(sent_C) if received is None else received
    # As bytes, which every library moves.
    sent, into = (t.view(len(t), -1).view(torch.uint8) for t in (sent_C, received))
    fabric.exchange(list(sent.unbind()), into)
    received[fabric.rank].copy_(sent_C[fabric.rank])
    return received


@torch.library.custom_op("surogate::exchange_rows", mutates_args=())
def _exchange_rows(sent_C: Tensor, number: int) -> Tensor:
    """[C, ...] of any dtype: `exchanged`."""
    return exchanged(sent_C.contiguous(), number)


@_exchange_rows.register_fake
def _(sent_C: Tensor, number: int) -> Tensor:
    return torch.empty_like(sent_C, memory_format=torch.contiguous_format)


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx: Any, sent_C: Tensor, number: int) -> Tensor:
        ctx.number = number
        return _exchange_rows(sent_C, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dreceived_C: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange_rows(dreceived_C, ctx.number), None


def exchange_rows(sent_C: Tensor, ranks: Linked) -> Tensor:
    """[C, ...]: in row r what rank r sent to this one. Its gradient is exchanged in the same way.

    `sent_C`: contiguous in its rows, of any dtype; row r goes to rank r of `ranks`.
    """
    found: Tensor = _ExchangeRows.apply(sent_C, ranks.number)
    return found


def gathered(own: Tensor, found_C: Tensor, number: int) -> Tensor:
    """`found_C`, which is room for what each rank gives, with that in it."""
    fabric = _fabrics[number]
    found_C[fabric.rank].copy_(own)
    fabric.gather([part.view(-1).view(torch.uint8) for part in found_C.unbind()])
    return found_C


@torch.library.custom_op("surogate::gather_rows_of_ranks", mutates_args=())
def _all_gather(own: Tensor, size: int, number: int) -> Tensor:
    """[...] → [C, ...]: what each rank gives."""
    return gathered(own, own.new_empty(size, *own.shape), number)


@_all_gather.register_fake
def _(own: Tensor, size: int, number: int) -> Tensor:
    return own.new_empty(size, *own.shape)


def all_gather(own: Tensor, ranks: Linked) -> Tensor:
    """[C, ...]: in row r what rank r gives, contiguous and of the same shape. It has no gradient."""
    found: Tensor = _all_gather(own, ranks.size, ranks.number)
    return found


@torch.library.custom_op("surogate::own_part", mutates_args=())
def _own_part(x_H: Tensor, size: int, number: int) -> Tensor:
    """[H, ...] → [H / C, ...]."""
    return x_H.unflatten(0, (size, -1))[_fabrics[number].rank].clone()


@_own_part.register_fake
def _(x_H: Tensor, size: int, number: int) -> Tensor:
    return x_H.new_empty(len(x_H) // size, *x_H.shape[1:])


@torch.library.custom_op("surogate::among_all_parts", mutates_args=())
def _among_all_parts(x_G: Tensor, size: int, number: int) -> Tensor:
    """[H / C, ...] → [H, ...]: zeros for the parts of other ranks."""
    found_CG = x_G.new_zeros(size, *x_G.shape)
    found_CG[_fabrics[number].rank] = x_G
    return found_CG.flatten(0, 1)


@_among_all_parts.register_fake
def _(x_G: Tensor, size: int, number: int) -> Tensor:
    return x_G.new_empty(len(x_G) * size, *x_G.shape[1:])


class _OwnPart(Function):
    @staticmethod
    def forward(ctx: Any, x_H: Tensor, size: int, number: int) -> Tensor:
        ctx.ranks = (size, number)
        return _own_part(x_H, size, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_G: Tensor) -> tuple[Tensor | None, ...]:
        return _among_all_parts(dx_G, *ctx.ranks), None, None


def own_part(x_H: Tensor, ranks: Linked) -> Tensor:
    """[H / C, ...]: this rank's part of what all ranks have. Its gradient is zero for the others: the sum over the
    ranks is the gradient of the whole.
    """
    found: Tensor = _OwnPart.apply(x_H, ranks.size, ranks.number)
    return found


EXCHANGES = (torch.ops.surogate.exchange_rows.default, torch.ops.surogate.gather_rows_of_ranks.default)
"""The ops of traced programs whose results are of all ranks of a group, a part of each."""
