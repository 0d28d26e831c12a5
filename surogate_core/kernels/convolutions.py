"""The causal convolution of each channel over the runs of packed rows, and for single steps.

A run is a document or a part of one; it may be empty, and shorter than the convolution is wide. Its state is its last
W − 1 inputs. The rows are written into a stream in which W − 1 rows with the state precede each run, so that plain
shifts of the stream see no other run. Every element is computed by itself, in one order, so the bits of a run depend on
nothing but the run, and a step gives the bits of the whole. Shapes do not depend on values, and nothing is read on the
host. Shape suffixes: N rows, R runs, C channels, W width, M = W − 1, T rows of the stream,
S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.kernels.chunks import only, state_dtype
from surogate_core.kernels.ops import region
from surogate_core.kernels.registry import op, workspace
from surogate_core.kernels.states import moved_on


def _stream(x_NC: Tensor, state_RMC: Tensor | None, borders: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """(stream [T, C], place of each row [N], places of the state behind each run [R, M])."""
    borders = borders.long()
    runs, kept = len(borders) - 1, width - 1
    row_N = torch.arange(x_NC.shape[0], device=x_NC.device)
    run_N = torch.searchsorted(borders[1:].contiguous(), row_N, right=True)
    place_N = row_N + (run_N + 1) * kept
    numbers_R1 = torch.arange(runs, device=x_NC.device)[:, None]
    inside_M = torch.arange(kept, device=x_NC.device)
    before_RM = borders[:-1, None] + numbers_R1 * kept + inside_M
    stream_TC = x_NC.new_zeros(x_NC.shape[0] + runs * kept, x_NC.shape[1], dtype=state_dtype(x_NC))
    stream_TC[place_N] = x_NC.to(stream_TC.dtype)
    if state_RMC is not None:
        stream_TC[before_RM] = state_RMC.to(stream_TC.dtype)
    return stream_TC, place_N, borders[1:, None] + numbers_R1 * kept + inside_M


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _states(x_NC: Tensor, width: int, runs: int) -> Tensor:
    return x_NC.new_empty((runs, width - 1, x_NC.shape[1]), dtype=state_dtype(x_NC))


@torch.library.custom_op("surogate::causal_convolution", mutates_args=())
def _forward(
    x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, borders: Tensor, initial: Tensor | None, finals: bool
) -> tuple[Tensor, Tensor]:
    width = weight_CW.shape[1]
    stream_TC, place_N, behind_RM = _stream(x_NC, initial, borders, width)
    y_NC = _weighed(_taps(stream_TC, width), weight_CW, bias_C)[place_N - (width - 1)]
    return y_NC.to(x_NC.dtype), stream_TC[behind_RM] if finals else _states(x_NC, width, 0)


def _taps(stream_TC: Tensor, width: int) -> list[Tensor]:
    """The inputs of every row of the stream from its row W - 1 on, oldest first, each [T - M, C]; views."""
    rows = len(stream_TC) - (width - 1)
    return [stream_TC[tap : tap + rows] for tap in range(width)]


def _weighed(taps: Sequence[Tensor], weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """The sum of the inputs, oldest first, times their weights. Products are rounded, so that no bit depends on whether
    a vector or a scalar loop adds them.
    """
    y = taps[0] * weight_CW[:, 0].to(taps[0].dtype)
    for tap in range(1, len(taps)):
        y = y + taps[tap] * weight_CW[:, tap].to(y.dtype)
    return y if bias_C is None else y + bias_C.to(y.dtype)


@_forward.register_fake
def _(
    x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, borders: Tensor, initial: Tensor | None, finals: bool
) -> tuple[Tensor, Tensor]:
    return _dense(x_NC), _states(x_NC, weight_CW.shape[1], len(borders) - 1 if finals else 0)


@torch.library.custom_op("surogate::causal_convolution_backward", mutates_args=())
def _backward(
    dy_NC: Tensor,
    dfinals: Tensor | None,
    x_NC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    borders: Tensor,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    width = weight_CW.shape[1]
    stream_TC, place_N, behind_RM = _stream(x_NC, initial, borders, width)
    # The zeros before each run are behind the run before it, so that shifts back see no other run.
    spread_TC = torch.zeros_like(stream_TC)
    spread_TC[place_N] = dy_NC.to(stream_TC.dtype)
    dstream_TC = torch.zeros_like(stream_TC)
    dy_TC = spread_TC[width - 1 :]
    for tap, dtap_TC in enumerate(_taps(dstream_TC, width)):
        dtap_TC += dy_TC * weight_CW[:, tap].to(dy_TC.dtype)
    dweight = [(dy_TC * tap_TC).sum(0) for tap_TC in _taps(stream_TC, width)]
    if dfinals is not None:
        dstream_TC[behind_RM] += dfinals
    dx_NC = dstream_TC[place_N].to(x_NC.dtype)
    dbias = x_NC.new_empty(0) if bias_C is None else dy_TC.sum(0).to(bias_C.dtype)
    dinitial = x_NC.new_empty(0)
    if initial is not None:
        before_RM = behind_RM - (borders[1:] - borders[:-1])[:, None]
        dinitial = dstream_TC[before_RM].to(initial.dtype)
    return dx_NC, torch.stack(dweight, dim=1).to(weight_CW.dtype), dbias, dinitial


@_backward.register_fake
def _(
    dy_NC: Tensor,
    dfinals: Tensor | None,
    x_NC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    borders: Tensor,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias, dinitial = (x_NC.new_empty(0) if t is None else _dense(t) for t in (bias_C, initial))
    return _dense(x_NC), _dense(weight_CW), dbias, dinitial


@workspace(torch.ops.surogate.causal_convolution)
def _forward_bytes(*arguments: Any) -> int:
    """The stream, the sum, a product, and the rows of the sum."""
    return 4 * _stream_bytes(arguments[0], arguments[1], arguments[3])


@workspace(torch.ops.surogate.causal_convolution_backward)
def _backward_bytes(*arguments: Any) -> int:
    """The streams of the inputs and of both gradients, a product, and the rows of a gradient."""
    return 5 * _stream_bytes(arguments[2], arguments[3], arguments[5])


def _stream_bytes(x_NC: Tensor, weight_CW: Tensor, borders: Tensor) -> int:
    rows = x_NC.shape[0] + (len(borders) - 1) * (weight_CW.shape[1] - 1)
    return rows * x_NC.shape[1] * state_dtype(x_NC).itemsize


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, finals = arguments
        y_NC, last = _forward(*tensors, finals)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        if not finals:
            ctx.mark_non_differentiable(last)
        return y_NC, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NC: Tensor | None, dfinals: Tensor | None) -> tuple[Tensor | None, ...]:
        x_NC, weight_CW, bias_C, borders, initial = ctx.saved_tensors
        if dy_NC is None:
            dy_NC = torch.zeros_like(x_NC)
        dx, dweight, dbias, dinitial = _backward(dy_NC, dfinals, x_NC, weight_CW, bias_C, borders, initial)
        return dx, dweight, None if bias_C is None else dbias, None, None if initial is None else dinitial, None


@op
def causal_convolution(
    x_NC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    borders: Tensor,
    *,
    initial: Tensor | None = None,
    finals: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y [N, C] in x's dtype, states behind the runs [R, W − 1, C]): each channel's last W inputs times its weights.

    The last weight belongs to the row itself. `borders`: [R + 1] int32 from 0 to N. A state is the last W − 1 inputs,
    oldest first, in fp32 (float64 for float64); before a run without `initial` they are zeros. Sums are fp32. Without
    `finals` the second result is [0, W − 1, C].
    """
    with region("att"):
        found: tuple[Tensor, Tensor] = _Convolution.apply(x_NC, weight_CW, bias_C, borders, initial, finals)
        return found


def _step(
    x_NC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, before: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor]]:
    """(y [N, C], the states after the row [N, M, C]) where every row is a run of its own."""
    (state_NMC,) = before
    with region("att"):
        dtype = state_dtype(x_NC)
        window_NWC = torch.cat((state_NMC.to(dtype), x_NC.to(dtype)[:, None]), dim=1)
        y_NC = _weighed(window_NWC.unbind(1), weight_CW, bias_C)
        return y_NC.to(x_NC.dtype), (window_NWC[:, 1:].contiguous(),)


@op
def causal_convolution_step(
    x_NC: Tensor, states_SMC: Tensor, slots_N: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
) -> Tensor:
    """y [N, C]: `causal_convolution` of one row of each of N slots [N] int64, whose states are moved on in place.

    It has the bits of `causal_convolution` and no gradient. Rows of the last slot do not count, see `states`.
    """
    return moved_on(partial(_step, x_NC, weight_CW, bias_C), (states_SMC,), slots_N)


def causal_convolution_scan(
    x_NC: Tensor,
    *,
    borders: Tensor | None,
    initial: Sequence[Tensor] | None = None,
    finals: bool = True,
    weight_CW: Tensor,
    bias_C: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor]]:
    """`causal_convolution` as a recurrence with one state [W − 1, C]. Without borders every row is a run."""
    if borders is None:
        before = (_states(x_NC, weight_CW.shape[1], x_NC.shape[0]).zero_(),) if initial is None else initial
        return _step(x_NC, weight_CW, bias_C, before)
    state = only(initial)
    # The op is not asked for the states, so that a kernel of training serves prompts too.
    y_NC, none = causal_convolution(x_NC, weight_CW, bias_C, borders, initial=state)
    return y_NC, (_behind(x_NC, state, borders, weight_CW.shape[1] - 1) if finals else none,)


def _behind(x_NC: Tensor, initial: Tensor | None, borders: Tensor, kept: int) -> Tensor:
    """The states behind the runs [R, M, C]: their last M inputs, of which short ones had some before them."""
    before_RMC = _states(x_NC, kept + 1, len(borders) - 1).zero_() if initial is None else initial
    if not x_NC.shape[0]:
        return before_RMC.clone()
    row_RM = borders[1:, None].long() + torch.arange(-kept, 0, device=x_NC.device)
    # Negative numbers name inputs before the run, which the state has.
    inside_RM1 = (row_RM - borders[:-1, None])[..., None]
    older_RMC = before_RMC.gather(1, (inside_RM1 + kept).clamp(0, kept - 1).expand_as(before_RMC))
    return torch.where(inside_RM1 >= 0, x_NC[row_RM.clamp(min=0)].to(before_RMC.dtype), older_RMC)


def causal_convolution_multiplications(channels: int, width: int) -> int:
    """Multiplications of one row."""
    return channels * width
