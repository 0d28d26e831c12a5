"""The op `grouped_product`: the plain product of trained weights, where torch has none in one launch.

Suffixes as in `surogate_core.kernels.experts`.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import experts_launches as launches
from surogate_kernels_triton import experts_products_programs as programs
from surogate_kernels_triton.experts_frozen import MULTIPLE


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::grouped_product", mutates_args=())
def _product(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped.masked_product`; a weight that is read transposed, as the gradient of x does, is not copied."""
    (x_RI,) = launches.rows_apart([x_RI])
    backward = weights_EOI.stride(1) == 1 and weights_EOI.stride(2) != 1
    stored = (weights_EOI.transpose(1, 2) if backward else weights_EOI).contiguous()
    named = {"choices": 1, "scale": 0.0, "backward": backward}
    return launches.grouped_sum([x_RI], [stored], None, [], None, ends_E, len(x_RI), **named)  # type: ignore[arg-type]


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::grouped_factors", mutates_args=())
def _factors(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped.masked_factors`."""
    (dy_RO,), (x_RI,) = launches.rows_apart([dy_RO]), launches.rows_apart([x_RI])
    outputs, inputs = dy_RO.shape[1], x_RI.shape[1]
    found = x_RI.new_empty(len(ends_E), outputs, inputs)
    side = 128
    programs.weight_factors[triton.cdiv(outputs, side) * triton.cdiv(inputs, side), len(ends_E)](
        dy_RO,
        x_RI,
        ends_E,
        found,
        dy_row=dy_RO.stride(0),
        x_row=x_RI.stride(0),
        OUT=outputs,
        IN=inputs,
        M=32,
        C=side,
        B=side,
        num_warps=8,
        num_stages=3,
    )
    return found


compute.describe(
    _product, _factors, torch.ops.surogate_triton.grouped_product, torch.ops.surogate_triton.grouped_factors
)


def grouped_product(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped.grouped_product` where `takes` accepts the arguments."""
    found: Tensor = compute.Grouped.apply(x_RI, ends_E, weights_EOI, _product, _factors)
    return found


def takes(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> bool:
    """Weights in the dtype of x, with sides that are multiples of `MULTIPLE`."""
    same = x_RI.dtype == weights_EOI.dtype and len(ends_E) < launches.MOST_EXPERTS
    return same and not any(side % MULTIPLE for side in weights_EOI.shape[1:])


def kernel() -> bundles.Kernel:
    """The kernel, below torch's in priority."""
    return bundles.Kernel(
        op="grouped_product",
        name="triton",
        function=grouped_product,
        supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float16, torch.bfloat16),
        takes=takes,
        priority=-1,
    )
