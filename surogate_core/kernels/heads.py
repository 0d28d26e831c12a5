"""Attention over rows that several ranks share (Ulysses, arXiv 2309.14509).

Each of C ranks has the queries, keys and values of 1/C of the positions. Before attention an all-to-all gives it all
positions of 1/C of the heads, and after it another one gives back its positions of all heads. Documents are therefore
attended to as on one rank, wherever a row is cut. The backward of each exchange is the other one.

Shape suffixes: C ranks that share a row, N tokens of the micro-batch, P = N / C tokens of a rank, H heads, K key/value
heads, G = H / C heads of a rank, E features of a query and a key, F features of a value.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.bundles.fabrics import Fabric
from surogate_core.errors import UserError
from surogate_core.kernels.regions import region

Attention = Callable[..., Tensor]

_fabrics: dict[int, Fabric] = {}
"""Number in the traced programs → the fabric of the ranks that share rows."""
_numbering = threading.Lock()
"""Ranks that are threads of one process take their numbers one after another."""


@dataclass(slots=True)
class SharedRows:
    """The ranks that share each row, as traced programs know them."""

    size: int
    """C."""
    number: int = -1
    """Key of their fabric; negative if programs are traced but never run."""

    @classmethod
    def of(cls, fabric: Fabric) -> SharedRows:
        """The ranks of a fabric. It takes the smallest free number, which is the same in all processes of a run: ranks
        find each other's compiled programs.
        """
        with _numbering:
            number = next(n for n in range(len(_fabrics) + 1) if n not in _fabrics)
            _fabrics[number] = fabric
        return cls(fabric.world, number)

    def close(self) -> None:
        """Free the number: programs that were traced with it never run again."""
        _fabrics.pop(self.number, None)


_active: ContextVar[SharedRows | None] = ContextVar("surogate_shared_rows", default=None)


@contextmanager
def sharing(rows: SharedRows | None) -> Iterator[None]:
    """Blocks that are traced inside attend over the positions of all these ranks."""
    token = _active.set(rows)
    try:
        yield
    finally:
        _active.reset(token)


def ranks_sharing_rows() -> int:
    """How many ranks share the rows of the blocks that are traced now; 0 if none do."""
    rows = _active.get()
    return 0 if rows is None else rows.size


def kv_heads_of_ranks(kv_heads: int, size: int) -> int:
    """Key/value heads of all ranks together: as many as there are, or each repeated until C divides them."""
    return math.lcm(kv_heads, size)


def over_shared_rows(attention: Attention) -> Attention:
    """Attention that exchanges heads for positions where ranks share rows; otherwise as it is.

    C must divide the query heads. Each rank uses the sinks of its heads, and the gradient is zero for the others: the
    sum over the ranks is the gradient of the whole row.
    """

    @wraps(attention)
    def call(
        q_NHE: Tensor,
        k_NKE: Tensor,
        v_NKF: Tensor,
        cu_seqlens_S: Tensor,
        max_seqlen: int,
        scale: float,
        *,
        sinks: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        rows = _active.get()
        if rows is None:
            return attention(q_NHE, k_NKE, v_NKF, cu_seqlens_S, max_seqlen, scale, sinks=sinks, **settings)
        if q_NHE.shape[1] % rows.size:
            raise UserError(
                f"context_parallel_size is {rows.size}, and does not divide the model's {q_NHE.shape[1]} attention "
                f"heads, which GPUs that share a row divide among themselves. Fix: context_parallel_size="
                f"{math.gcd(q_NHE.shape[1], rows.size)}"
            )
        with region("att"):
            q_NHE, k_NKE, v_NKF = _to_own_heads(q_NHE, k_NKE, v_NKF, rows)
            if sinks is not None:
                sinks = _OwnHeads.apply(sinks, rows.size, rows.number)
        y_NGF = attention(q_NHE, k_NKE, v_NKF, cu_seqlens_S, max_seqlen, scale, sinks=sinks, **settings)
        with region("att"):
            return _ToPositions.apply(y_NGF, rows.size, rows.number)

    return call


def _to_own_heads(q_PHE: Tensor, k_PKE: Tensor, v_PKF: Tensor, rows: SharedRows) -> tuple[Tensor, ...]:
    """All positions of this rank's heads. One exchange sends what has as many features."""
    repeats = kv_heads_of_ranks(k_PKE.shape[1], rows.size) // k_PKE.shape[1]
    if repeats > 1:
        k_PKE, v_PKF = (t.repeat_interleave(repeats, dim=1) for t in (k_PKE, v_PKF))
    if v_PKF.shape[2] != q_PHE.shape[2]:
        return (*_exchange_heads((q_PHE, k_PKE), rows), *_exchange_heads((v_PKF,), rows))
    return _exchange_heads((q_PHE, k_PKE, v_PKF), rows)


def _exchange_heads(tensors: Sequence[Tensor], rows: SharedRows) -> tuple[Tensor, ...]:
    # Each rank's heads of all of them are adjacent.
    parts = [t.unflatten(1, (rows.size, -1)) for t in tensors]
    heads = [part.shape[2] for part in parts]
    found: tuple[Tensor, ...] = _ToHeads.apply(torch.cat(parts, dim=2).flatten(1, 2), rows.size, rows.number).split(
        heads, dim=1
    )
    return found


def _exchanged(sent_CPGE: Tensor, number: int) -> Tensor:
    """[C, P, G, E]: in row r what rank r sent to this one."""
    fabric = _fabrics[number]
    received = torch.empty_like(sent_CPGE)
    # As bytes, which every library moves.
    sent, into = (t.view(len(t), -1).view(torch.uint8) for t in (sent_CPGE, received))
    fabric.exchange(list(sent.unbind()), into)
    received[fabric.rank].copy_(sent_CPGE[fabric.rank])
    return received


@torch.library.custom_op("surogate::positions_to_heads", mutates_args=())
def _to_heads(x_PHE: Tensor, size: int, number: int) -> Tensor:
    """[P, H, E] → [N, G, E]: all positions of this rank's heads."""
    sent = x_PHE.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    return _exchanged(sent, number).flatten(0, 1)


@_to_heads.register_fake
def _(x_PHE: Tensor, size: int, number: int) -> Tensor:
    positions, heads, features = x_PHE.shape
    return x_PHE.new_empty(positions * size, heads // size, features)


@torch.library.custom_op("surogate::heads_to_positions", mutates_args=())
def _to_positions(x_NGE: Tensor, size: int, number: int) -> Tensor:
    """[N, G, E] → [P, H, E]: all heads of this rank's positions."""
    received = _exchanged(x_NGE.contiguous().unflatten(0, (size, -1)), number)
    return received.transpose(0, 1).contiguous().flatten(1, 2)


@_to_positions.register_fake
def _(x_NGE: Tensor, size: int, number: int) -> Tensor:
    positions, heads, features = x_NGE.shape
    return x_NGE.new_empty(positions // size, heads * size, features)


@torch.library.custom_op("surogate::own_heads", mutates_args=())
def _own_heads(x_H: Tensor, size: int, number: int) -> Tensor:
    """[H] → [G]: the values of this rank's heads."""
    return x_H.unflatten(0, (size, -1))[_fabrics[number].rank].clone()


@_own_heads.register_fake
def _(x_H: Tensor, size: int, number: int) -> Tensor:
    return x_H.new_empty(len(x_H) // size)


@torch.library.custom_op("surogate::among_all_heads", mutates_args=())
def _among_all_heads(x_G: Tensor, size: int, number: int) -> Tensor:
    """[G] → [H]: zeros for the heads of other ranks."""
    found_CG = x_G.new_zeros(size, len(x_G))
    found_CG[_fabrics[number].rank] = x_G
    return found_CG.flatten()


@_among_all_heads.register_fake
def _(x_G: Tensor, size: int, number: int) -> Tensor:
    return x_G.new_empty(len(x_G) * size)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, x_PHE: Tensor, size: int, number: int) -> Tensor:
        ctx.rows = (size, number)
        return _to_heads(x_PHE, size, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NGE: Tensor) -> tuple[Tensor | None, ...]:
        return _to_positions(dy_NGE, *ctx.rows), None, None


class _ToPositions(Function):
    @staticmethod
    def forward(ctx: Any, x_NGE: Tensor, size: int, number: int) -> Tensor:
        ctx.rows = (size, number)
        return _to_positions(x_NGE, size, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_PHE: Tensor) -> tuple[Tensor | None, ...]:
        return _to_heads(dy_PHE, *ctx.rows), None, None


class _OwnHeads(Function):
    @staticmethod
    def forward(ctx: Any, x_H: Tensor, size: int, number: int) -> Tensor:
        ctx.rows = (size, number)
        return _own_heads(x_H, size, number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_G: Tensor) -> tuple[Tensor | None, ...]:
        return _among_all_heads(dx_G, *ctx.rows), None, None


EXCHANGES = (torch.ops.surogate.positions_to_heads.default, torch.ops.surogate.heads_to_positions.default)
"""The ops of traced programs that exchange their input among the ranks that share rows."""
