"""Scans as ops: the gated delta rule and the state space of Mamba-2, over runs of packed rows and for single steps.

`chunks` has the formulas. A scan is one node of a traced graph, with a backward of its own that keeps its inputs and
computes the states again. A run is a document or a part of one; it may be empty. On a CPU its bits depend on the run
alone: neither on its place nor on its neighbours. On a GPU the references have static shapes and read nothing on the
host. Shape suffixes: N rows, R runs, G heads of keys, H heads (a multiple of G: consecutive heads share a key), E
features of a key, F features of a value, S slots.

The functions `*_step` move the states of a cache's slots on by a row. The functions `*_scan` have the form by which a
block declares a recurrence: ``(*rows, borders, initial, **parameters) → (y, (states,))``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from surogate_core.kernels.chunks import Scan, only, places_of, state_dtype
from surogate_core.kernels.ops import region
from surogate_core.kernels.registry import op, workspace
from surogate_core.kernels.states import moved_on

CHUNK = 64
"""Positions of a chunk, unless a call names another number."""


def scan_multiplications(scan: Callable[..., object], state: Sequence[int]) -> int:
    """Multiplications of one row in a scan of this module with a state of this shape, without the decay.

    The state is written and read once; the delta rule reads it twice. Chunks need more, which a count of necessary work
    leaves out.
    """
    return math.prod(state) * (3 if scan is gated_delta_scan else 2)


def _parts(borders: Tensor, chunk: int) -> Iterator[tuple[int | None, slice, Tensor, int]]:
    """(run, its rows, their borders, chunk) of the calculations one after the other.

    On a CPU each run by itself, in chunks not longer than the run; on other devices all runs at once.
    """
    if borders.device.type != "cpu":
        yield None, slice(None), borders, chunk
        return
    for number, (start, stop) in enumerate(pairwise(borders.tolist())):
        if stop > start:
            yield number, slice(start, stop), torch.tensor([0, stop - start]), min(chunk, stop - start)


def _of_run(state_RHEF: Tensor | None, run: int | None) -> Tensor | None:
    return state_RHEF if state_RHEF is None or run is None else state_RHEF[run : run + 1]


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _finals(v_NHF: Tensor, k_NGE: Tensor, runs: int) -> Tensor:
    return v_NHF.new_empty((runs, v_NHF.shape[1], k_NGE.shape[2], v_NHF.shape[2]), dtype=state_dtype(v_NHF))


@torch.library.custom_op("surogate::chunked_scan", mutates_args=())
def _forward(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    finals: bool,
    chunk: int,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    y, last = _dense(v_NHF), _finals(v_NHF, k_NGE, len(borders) - 1 if finals else 0)
    last.zero_() if initial is None or not finals else last.copy_(initial)
    if not v_NHF.shape[0]:
        return y, last
    for run, rows, inner, size in _parts(borders, chunk):
        given = tuple(x[rows] for x in (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH))
        scan = Scan.of(given, inner, _of_run(initial, run), size, delta)
        new, leaving = scan.forward()
        y[rows] = scan.places.rows(scan.outputs(new, leaving)).to(y.dtype)
        if finals:
            reached = scan.places.finals(leaving, scan.initial, entering=False)
            last[slice(None) if run is None else slice(run, run + 1)] = reached
    return y, last


@_forward.register_fake
def _(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    finals: bool,
    chunk: int,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    return _dense(v_NHF), _finals(v_NHF, k_NGE, len(borders) - 1 if finals else 0)


@torch.library.custom_op("surogate::chunked_scan_backward", mutates_args=())
def _backward(
    dy_NHF: Tensor,
    dfinals: Tensor | None,
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    chunk: int,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH)
    gradients = tuple(_dense(x) for x in inputs)
    dinitial = _dinitial(v_NHF, initial)
    if initial is not None:
        # A run without rows passes its initial state on.
        dinitial.zero_() if dfinals is None else dinitial.copy_(dfinals)
    for run, rows, inner, size in _parts(borders, chunk) if v_NHF.shape[0] else ():
        scan = Scan.of(tuple(x[rows] for x in inputs), inner, _of_run(initial, run), size, delta)
        dy = scan.places.chunks(dy_NHF[rows], scan.v.dtype)
        found, dfirst = scan.backward(dy, _of_run(dfinals, run))
        for gradient, x in zip(gradients, found, strict=True):
            of_heads = scan.places.rows(x)
            shared = of_heads.shape[1] // gradient.shape[1]
            gradient[rows] = of_heads.unflatten(1, (-1, shared)).sum(2) if shared > 1 else of_heads
        if initial is not None:
            dinitial[slice(None) if run is None else slice(run, run + 1)] = dfirst
    dq, dk, dv, ddecay, dbeta = gradients
    return dq, dk, dv, ddecay, dbeta, dinitial


def _dinitial(v_NHF: Tensor, initial: Tensor | None) -> Tensor:
    return v_NHF.new_empty(0) if initial is None else _dense(initial)


@_backward.register_fake
def _(
    dy_NHF: Tensor,
    dfinals: Tensor | None,
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    chunk: int,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, ddecay, dbeta = (_dense(x) for x in (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH))
    return dq, dk, dv, ddecay, dbeta, _dinitial(v_NHF, initial)


def _products(k_shape: Sequence[int], v_shape: Sequence[int], chunk: int, delta: bool) -> int:
    """Multiplications of the forward."""
    rows, heads, values = v_shape
    keys = k_shape[2]
    inside, system = chunk * (keys + values), chunk * (2 * keys + values + chunk)
    return rows * heads * (inside + 2 * keys * values + (system + keys * values if delta else 0))


@register_flop_formula(torch.ops.surogate.chunked_scan)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *others: Any, **named: Any) -> int:
    chunk, delta = others[-2:]
    return 2 * _products(k_shape, v_shape, chunk, delta)


@register_flop_formula(torch.ops.surogate.chunked_scan_backward)
def _backward_flops(dy: Any, dfinals: Any, q_shape: Any, k_shape: Any, v_shape: Any, *others: Any, **named: Any) -> int:
    """The forward again, and two products for each of its products."""
    chunk, delta = others[-2:]
    return 6 * _products(k_shape, v_shape, chunk, delta)


def _bytes(tensors: Sequence[Tensor], chunk: int, squares: int, keys: int, values: int, states: int) -> int:
    """Bytes that a pass allocates, by the numbers of [C, C], [C, E], [C, F] and [E, F] of each chunk and head."""
    _, k_NGE, v_NHF, _, _, borders = tensors
    rows, heads, width = v_NHF.shape
    count = places_of(rows, len(borders) - 1, chunk) * heads * state_dtype(v_NHF).itemsize
    return count * (
        chunk * (squares * chunk + keys * k_NGE.shape[2] + values * width) + states * k_NGE.shape[2] * width
    )


@workspace(torch.ops.surogate.chunked_scan)
def _forward_bytes(*arguments: Any) -> int:
    """A bound: 0 to 40 % above measured peaks of one run."""
    return _bytes(arguments[:6], arguments[8], 4, 3, 3, 3)


@workspace(torch.ops.surogate.chunked_scan_backward)
def _backward_bytes(*arguments: Any) -> int:
    """A bound: 0 to 50 % above measured peaks of one run."""
    return _bytes(arguments[2:8], arguments[9], 13, 8, 6, 6)


class _ChunkedScan(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, finals, chunk, delta = arguments
        y, last = _forward(*tensors, finals, chunk, delta)
        ctx.save_for_backward(*tensors)
        ctx.settings = (chunk, delta)
        ctx.set_materialize_grads(False)
        if not finals:
            ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinals: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, none = ctx.saved_tensors, (None, None, None)
        if dy is None:
            dy = torch.zeros_like(tensors[2])
        *found, dinitial = _backward(dy, dfinals, *tensors, *ctx.settings)
        return (*found, None, None if tensors[-1] is None else dinitial, *none)


@op
def gated_delta(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    *,
    initial: Tensor | None = None,
    finals: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(y [N, H, F] in v's dtype, states behind the runs [R, H, E, F]) of the gated delta rule (arXiv 2412.06464).

    At each row of a run S ← exp(decay) S, then S ← S + k (β (v − Sᵀ k))ᵀ, and y = Sᵀ q. `decay_NH` is a logarithm,
    at most 0. A scale or a norm of queries and keys is the caller's. `borders`: [R + 1] int32 from 0 to N. `initial`:
    the states before the runs, zeros without it. States are fp32 (float64 if v is), and so is the arithmetic. Without
    `finals` the second result is [0, H, E, F]. Results for other numbers of positions in a `chunk` agree to rounding.
    """
    with region("att"):
        found: tuple[Tensor, Tensor] = _ChunkedScan.apply(
            q_NGE, k_NGE, v_NHF, decay_NH, beta_NH, borders, initial, finals, chunk, True
        )
        return found


@op
def ssd(
    x_NHF: Tensor,
    b_NGE: Tensor,
    c_NGE: Tensor,
    decay_NH: Tensor,
    dt_NH: Tensor,
    borders: Tensor,
    *,
    initial: Tensor | None = None,
    finals: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(y [N, H, F] in x's dtype, states behind the runs [R, H, E, F]) of the state space of Mamba-2 (arXiv 2405.21060).

    At each row of a run S ← exp(decay) S + b (dt x)ᵀ and y = Sᵀ c; `decay_NH` is dt · A, at most 0. The term D · x is
    the caller's. Everything else as in `gated_delta`; a state is [E, F], the transpose of what Mamba keeps.
    """
    with region("att"):
        found: tuple[Tensor, Tensor] = _ChunkedScan.apply(
            c_NGE, b_NGE, x_NHF, decay_NH, dt_NH, borders, initial, finals, chunk, False
        )
        return found


def _step(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    delta: bool,
    before: Sequence[Tensor],
) -> tuple[Tensor, tuple[Tensor]]:
    """(y [N, H, F], the states after the row [N, H, E, F]) where every row is a run of its own."""
    dtype, heads = state_dtype(v_NHF), v_NHF.shape[1]
    shared = heads // k_NGE.shape[1]
    (state_NHEF,) = before
    with region("att"):
        q_NHE1, k_NHE1 = (x.to(dtype).repeat_interleave(shared, dim=1)[..., None] for x in (q_NGE, k_NGE))
        state_NHEF = state_NHEF.to(dtype) * decay_NH.to(dtype).exp()[..., None, None]
        new_NHF = v_NHF.to(dtype)
        if delta:
            new_NHF = new_NHF - (state_NHEF * k_NHE1).sum(2)
        new_NHF = new_NHF * beta_NH.to(dtype)[..., None]
        state_NHEF = state_NHEF + k_NHE1 * new_NHF[:, :, None]
        return (state_NHEF * q_NHE1).sum(2).to(v_NHF.dtype), (state_NHEF,)


@op
def gated_delta_step(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    states_SHEF: Tensor,
    slots_N: Tensor,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """y [N, H, F]: `gated_delta` of one row of each of N slots [N] int64, whose states are moved on in place.

    Rows of the last slot do not count, see `states`. It has no gradient. `chunk` has no influence.
    """
    rows = (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH)
    return moved_on(partial(_step, *rows, True), (states_SHEF,), slots_N)


@op
def ssd_step(
    x_NHF: Tensor,
    b_NGE: Tensor,
    c_NGE: Tensor,
    decay_NH: Tensor,
    dt_NH: Tensor,
    states_SHEF: Tensor,
    slots_N: Tensor,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """y [N, H, F]: `ssd` of one row of each of N slots, everything else as in `gated_delta_step`."""
    rows = (c_NGE, b_NGE, x_NHF, decay_NH, dt_NH)
    return moved_on(partial(_step, *rows, False), (states_SHEF,), slots_N)


def gated_delta_scan(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    *,
    borders: Tensor | None,
    initial: Sequence[Tensor] | None = None,
    finals: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, tuple[Tensor]]:
    """`gated_delta` as a recurrence with one state [H, E, F]. Without borders every row is a run: one decoding step."""
    rows = (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH)
    if borders is None:
        return _step(*rows, True, _before(v_NHF, k_NGE, initial))
    y, last = gated_delta(*rows, borders, initial=only(initial), finals=finals, chunk=chunk)
    return y, (last,)


def ssd_scan(
    x_NHF: Tensor,
    b_NGE: Tensor,
    c_NGE: Tensor,
    decay_NH: Tensor,
    dt_NH: Tensor,
    *,
    borders: Tensor | None,
    initial: Sequence[Tensor] | None = None,
    finals: bool = True,
    chunk: int = CHUNK,
) -> tuple[Tensor, tuple[Tensor]]:
    """`ssd` as a recurrence with one state [H, E, F]. Without borders every row is a run: one decoding step."""
    if borders is None:
        return _step(c_NGE, b_NGE, x_NHF, decay_NH, dt_NH, False, _before(x_NHF, b_NGE, initial))
    rows = (x_NHF, b_NGE, c_NGE, decay_NH, dt_NH)
    y, last = ssd(*rows, borders, initial=only(initial), finals=finals, chunk=chunk)
    return y, (last,)


def _before(v_NHF: Tensor, k_NGE: Tensor, initial: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """The states before each row: zeros if none are given."""
    return (_finals(v_NHF, k_NGE, v_NHF.shape[0]).zero_(),) if initial is None else initial
