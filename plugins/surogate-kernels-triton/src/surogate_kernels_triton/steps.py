"""The ops `gated_delta_step`, `ssd_step` and `causal_convolution_step` in Triton.

A row's bits depend on its own numbers and on what its slot holds, not on the other rows. Shape suffixes as in
`surogate_core.kernels.scans`: N rows, S slots, G heads of keys, H of values, E features of a key, F of a value; C
channels, M = W - 1 inputs that a state holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import steps_programs as programs
from surogate_kernels_triton.attention import padded
from surogate_kernels_triton.scans import with_adjacent_features

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST_KEY = 256
"""Most features of a key."""
WIDEST = 8
"""Most inputs that an output of the convolution has."""
CHANNELS = 512
"""Channels of a program of the convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTile:
    """Columns of a state that a program moves on, and its warps. Fixed: sums have the same bits on every run."""

    f: int
    warps: int


TILE = StepTile(f=64, warps=4)
"""32 KiB of a state with 128 features of a key, 64 numbers a thread: 3.3 and 3.8 TB/s with 128 sequences on an H200,
5 % more than with 32 columns, and the best of six tiles (`benchmarks/recurrent_steps.py`).
"""


@torch.library.custom_op("surogate_triton::scan_step", mutates_args=("states_SHEF",))
def _scan_step(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    states_SHEF: Tensor,
    slots_N: Tensor,
    delta: bool,
) -> Tensor:
    rows, heads, values = v_NHF.shape
    features = k_NGE.shape[2]
    y = v_NHF.new_empty(v_NHF.shape)
    if not rows:
        return y
    q, k, v = with_adjacent_features(q_NGE), with_adjacent_features(k_NGE), with_adjacent_features(v_NHF)
    columns = min(TILE.f, padded(values))
    programs.scan_step[rows * heads * triton.cdiv(values, columns),](
        *(q, k, v, decay_NH, beta_NH, states_SHEF, slots_N.contiguous(), y),
        states_SHEF.shape[0] - 1,
        *(stride for x in (q, k, v, decay_NH, beta_NH) for stride in x.stride()[:2]),
        H=heads,
        SHARED=heads // k.shape[1],
        E=features,
        F=values,
        EP=padded(features),
        FP=columns,
        DELTA=delta,
        num_warps=TILE.warps,
    )
    return y


@_scan_step.register_fake
def _(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    states_SHEF: Tensor,
    slots_N: Tensor,
    delta: bool,
) -> Tensor:
    return v_NHF.new_empty(v_NHF.shape)


@torch.library.custom_op("surogate_triton::convolution_step", mutates_args=("states_SMC",))
def _convolution_step(
    x_NC: Tensor, states_SMC: Tensor, slots_N: Tensor, weight_CW: Tensor, bias_C: Tensor | None
) -> Tensor:
    rows, channels = x_NC.shape
    y = x_NC.new_empty(x_NC.shape)
    if not rows:
        return y
    x = with_adjacent_features(x_NC)
    programs.convolution_step[rows, triton.cdiv(channels, CHANNELS)](
        *(x, weight_CW.contiguous(), bias_C, states_SMC, slots_N.contiguous(), y),
        *(states_SMC.shape[0] - 1, channels, x.stride(0)),
        W=weight_CW.shape[1],
        C=CHANNELS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


@_convolution_step.register_fake
def _(x_NC: Tensor, states_SMC: Tensor, slots_N: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    return x_NC.new_empty(x_NC.shape)


def gated_delta_step(*rows: Tensor, chunk: int = 0) -> Tensor:
    """`scans.gated_delta_step` of (q, k, v, decay, beta, states, slots)."""
    with compute.region("att"):
        y_NHF: Tensor = _scan_step(*rows, True)
        return y_NHF


def ssd_step(x_NHF: Tensor, b_NGE: Tensor, c_NGE: Tensor, *rest: Tensor, chunk: int = 0) -> Tensor:
    """`scans.ssd_step`; `rest`: decay, dt, states, slots."""
    with compute.region("att"):
        y_NHF: Tensor = _scan_step(c_NGE, b_NGE, x_NHF, *rest, False)
        return y_NHF


def causal_convolution_step(
    x_NC: Tensor, states_SMC: Tensor, slots_N: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
) -> Tensor:
    """`convolutions.causal_convolution_step`, with its bits."""
    with compute.region("att"):
        y_NC: Tensor = _convolution_step(x_NC, states_SMC, slots_N, weight_CW, bias_C)
        return y_NC


def takes_delta(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    states_SHEF: Tensor,
    slots_N: Tensor,
    **named: Any,
) -> bool:
    """Whether a program holds columns of a state, and states are fp32 without gaps."""
    state = (v_NHF.shape[1], k_NGE.shape[2], v_NHF.shape[2])
    known = all(x.dtype in DTYPES for x in (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH))
    return known and 0 < k_NGE.shape[2] <= WIDEST_KEY and v_NHF.shape[2] > 0 and _written(states_SHEF, state)


def takes_ssd(x_NHF: Tensor, b_NGE: Tensor, c_NGE: Tensor, *rest: Any, **named: Any) -> bool:
    """The same for `ssd_step`."""
    return takes_delta(c_NGE, b_NGE, x_NHF, *rest, **named)


def takes_convolution(
    x_NC: Tensor, states_SMC: Tensor, slots_N: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
) -> bool:
    """Whether the convolution is as narrow as its programs are made for, and states are fp32 without gaps."""
    width = weight_CW.shape[1]
    return x_NC.dtype in DTYPES and 1 < width <= WIDEST and _written(states_SMC, (width - 1, x_NC.shape[1]))


def _written(states: Tensor, shape: tuple[int, ...]) -> bool:
    return states.dtype == torch.float32 and states.is_contiguous() and tuple(states.shape[1:]) == shape


def kernels() -> tuple[bundles.Kernel, ...]:
    """The kernels of the steps."""
    kernel = partial(
        bundles.Kernel,
        name="triton",
        supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
        priority=10,
    )
    chunk = frozenset({"chunk"})
    return (
        kernel(op="gated_delta_step", function=gated_delta_step, takes=takes_delta, knows=chunk),
        kernel(op="ssd_step", function=ssd_step, takes=takes_ssd, knows=chunk),
        kernel(op="causal_convolution_step", function=causal_convolution_step, takes=takes_convolution),
    )
