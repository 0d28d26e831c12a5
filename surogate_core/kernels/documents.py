"""Sums over the documents of a micro-batch, for objectives of whole sequences.

Shape suffix: N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def document_starts(positions_N: Tensor) -> Tensor:
    """[N] bool: the first token of each document, where its position is 0."""
    return positions_N == 0


def document_sums(x_N: Tensor, positions_N: Tensor) -> Tensor:
    """[N]: for each token the sum of x over its document, in fp32 (float64 stays); see `segment_sums`."""
    return segment_sums(x_N, document_starts(positions_N))


def segment_sums(x_N: Tensor, starts_N: Tensor) -> Tensor:
    """[N]: for each token the sum of x over its segment, in fp32 (float64 stays).

    A segment begins where `starts_N` is true.
    Differentiable in x, and traced as one op, so an objective may call it. The order of the additions depends only on
    places in the segment: a segment has the same bits wherever it lies in a row, on CPUs and GPUs, in every run. The
    values are added in float64 and the sum is rounded once. To compare two models, sum the differences of their
    log-probabilities; the difference of two sums has the rounding of both.
    """
    return _SegmentSums.apply(x_N, starts_N)


class _SegmentSums(Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, starts_N: Tensor) -> Tensor:
        ctx.save_for_backward(starts_N)
        ctx.dtype = x_N.dtype
        return _sums(x_N, starts_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_N: Tensor) -> tuple[Tensor, None]:
        (starts_N,) = ctx.saved_tensors
        return _sums(dy_N, starts_N).to(ctx.dtype), None


@torch.library.custom_op("surogate::segment_sums", mutates_args=())
def _sums(x_N: Tensor, starts_N: Tensor) -> Tensor:
    n = x_N.shape[0]
    places_N = torch.arange(n, device=x_N.device)
    zero = torch.zeros((), dtype=torch.float64, device=x_N.device)
    place_N = places_N - torch.where(starts_N, places_N, 0).cummax(0).values
    sums_N = x_N.double()
    distance = 1
    while distance < n:  # afterwards the sum of the 2 · distance values up to each place, or of all from the start
        earlier_N = torch.where(place_N[distance:] >= distance, sums_N[:-distance], zero)
        sums_N = torch.cat((sums_N[:distance], sums_N[distance:] + earlier_N))
        distance *= 2
    ends_N = torch.where(starts_N.roll(-1), places_N, n - 1)
    last_N = ends_N.flip(0).cummin(0).values.flip(0)
    return sums_N[last_N].to(_wide(x_N.dtype))


@_sums.register_fake
def _(x_N: Tensor, starts_N: Tensor) -> Tensor:
    return x_N.new_empty(x_N.shape, dtype=_wide(x_N.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
