"""Attention over rows that several ranks share (Ulysses, arXiv 2309.14509).

Each of C ranks has the queries, keys and values of 1/C of the positions. Before attention an all-to-all gives it all
positions of 1/C of the heads, and after it another one gives back its positions of all heads. Documents are therefore
attended to as on one rank, wherever a row is cut. The backward of each exchange is the other one.

Shape suffixes: C ranks that share a row, N tokens of the micro-batch, P = N / C tokens of a rank, H heads, K key/value
heads, G = H / C heads of a rank, E features of a query and a key, F features of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.errors import UserError
from surogate_core.kernels.linked import Linked, active, exchanged, own_part
from surogate_core.kernels.regions import region

Attention = Callable[..., Tensor]


class SharedRows(Linked):
    """The ranks that share each row."""


def ranks_sharing_rows() -> int:
    """How many ranks share the rows of the blocks that are traced now; 0 if none do."""
    rows = active(SharedRows)
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
        rows = active(SharedRows)
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
                sinks = own_part(sinks, rows)
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


@torch.library.custom_op("surogate::positions_to_heads", mutates_args=())
def _to_heads(x_PHE: Tensor, size: int, number: int) -> Tensor:
    """[P, H, E] → [N, G, E]: all positions of this rank's heads."""
    sent = x_PHE.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
    return exchanged(sent, number).flatten(0, 1)


@_to_heads.register_fake
def _(x_PHE: Tensor, size: int, number: int) -> Tensor:
    positions, heads, features = x_PHE.shape
    return x_PHE.new_empty(positions * size, heads // size, features)


@torch.library.custom_op("surogate::heads_to_positions", mutates_args=())
def _to_positions(x_NGE: Tensor, size: int, number: int) -> Tensor:
    """[N, G, E] → [P, H, E]: all heads of this rank's positions."""
    received = exchanged(x_NGE.contiguous().unflatten(0, (size, -1)), number)
    return received.transpose(0, 1).contiguous().flatten(1, 2)


@_to_positions.register_fake
def _(x_NGE: Tensor, size: int, number: int) -> Tensor:
    positions, heads, features = x_NGE.shape
    return x_NGE.new_empty(positions // size, heads * size, features)


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


EXCHANGES = (torch.ops.surogate.positions_to_heads.default, torch.ops.surogate.heads_to_positions.default)
"""The ops of traced programs that exchange their input among the ranks that share rows."""
