"""The products of experts: each range of sorted rows times its expert's weight, and their gradients.

Shape suffixes: E experts, R rows in the order of their experts, I inputs, O outputs; expert e has the rows up to
``ends[e]``, from where those of the expert before it end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import register_flop_formula

from surogate_core.bundles import Kernel
from surogate_core.kernels.native import assumed, capability
from surogate_core.kernels.registry import op, workspace

GROUPS = 1024
"""torch's grouped products take fewer experts than this."""
ALIGNED = 8
"""Sides of torch's operands are multiples of this: 16 bytes of bf16."""

log = structlog.get_logger(__name__)


def _ranges(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have rows, on a CPU."""
    first = 0
    for number, end in enumerate(ends_E.tolist()):
        if end > first:
            yield number, slice(first, end)
        first = end


def _masks(ends_E: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, mask of its rows [R, 1]) of all experts, without waiting for the device."""
    places = torch.arange(rows, device=ends_E.device, dtype=ends_E.dtype)
    expert_R1 = torch.searchsorted(ends_E, places, right=True)[:, None]
    for number in range(len(ends_E)):
        yield number, expert_R1 == number


# Each is a single op of a traced graph, whose size would otherwise grow with the number of experts.


@torch.library.custom_op("surogate::grouped_product", mutates_args=())
def masked_product(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """[R, O]: each row times its expert's weight transposed. On a GPU every expert multiplies all rows."""
    y_RO = x_RI.new_zeros(x_RI.shape[0], weights_EOI.shape[1])
    if ends_E.device.type == "cpu":
        for number, rows in _ranges(ends_E):
            y_RO[rows] = x_RI[rows] @ weights_EOI[number].t()
        return y_RO
    for number, mask_R1 in _masks(ends_E, x_RI.shape[0]):
        y_RO = torch.where(mask_R1, x_RI @ weights_EOI[number].t(), y_RO)
    return y_RO


@torch.library.custom_op("surogate::grouped_factors", mutates_args=())
def masked_factors(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """[E, O, I]: for each expert the sum over its rows of dyᵀ x."""
    found = x_RI.new_zeros(len(ends_E), dy_RO.shape[1], x_RI.shape[1])
    if ends_E.device.type == "cpu":
        for number, rows in _ranges(ends_E):
            found[number] = dy_RO[rows].t() @ x_RI[rows]
        return found
    for number, mask_R1 in _masks(ends_E, x_RI.shape[0]):
        found[number] = torch.where(mask_R1, dy_RO, 0.0).t() @ x_RI
    return found


def _aligned(tensor: Tensor) -> Tensor:
    """With zeros behind the last side up to the next multiple of `ALIGNED`, and strides that torch's kernels read."""
    missing = -tensor.shape[-1] % ALIGNED
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    steps = tensor.stride()
    regular = steps[-1] == 1 and all(step % ALIGNED == 0 for step in steps[:-1])
    return tensor if regular and tensor.data_ptr() % 16 == 0 else tensor.contiguous()


@torch.library.custom_op("surogate::grouped_mm", mutates_args=())
def torch_product(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`masked_product` by torch's grouped product; sums are fp32, sizes stay on the device."""
    inputs, outputs = x_RI.shape[1], weights_EOI.shape[1]
    if weights_EOI.stride(1) == 1 and weights_EOI.stride(2) != 1:
        # A weight that is read transposed, as the gradient of x does: its rows are the inputs.
        weights_EIO = _aligned(weights_EOI.transpose(1, 2))
        if inputs % ALIGNED:
            weights_EIO = torch.nn.functional.pad(weights_EIO, (0, 0, 0, -inputs % ALIGNED))
    else:
        weights_EIO = _aligned(weights_EOI).transpose(1, 2)
        if outputs % ALIGNED:
            weights_EIO = torch.nn.functional.pad(weights_EIO, (0, -outputs % ALIGNED))
    found: Tensor = torch._grouped_mm(_aligned(x_RI), weights_EIO, offs=ends_E)
    return found if found.shape[1] == outputs else found[:, :outputs].contiguous()


@torch.library.custom_op("surogate::grouped_mm_factors", mutates_args=())
def torch_factors(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """`masked_factors` by torch's grouped product."""
    outputs, inputs = dy_RO.shape[1], x_RI.shape[1]
    found: Tensor = torch._grouped_mm(_aligned(dy_RO).t(), _aligned(x_RI), offs=ends_E)
    wanted = found[:, :outputs, :inputs]
    return wanted if wanted.is_contiguous() else wanted.contiguous()


def _describe(product: Any, factors: Any, product_op: Any, factors_op: Any) -> None:
    """Fakes and FLOPs of a pair of ops."""

    def product_flops(x_shape: Sequence[int], weights_shape: Sequence[int], *others: Any, **kwargs: Any) -> int:
        return 2 * x_shape[0] * weights_shape[1] * weights_shape[2]

    def factor_flops(dy_shape: Sequence[int], x_shape: Sequence[int], *others: Any, **kwargs: Any) -> int:
        return 2 * dy_shape[0] * dy_shape[1] * x_shape[1]

    product.register_fake(lambda x_RI, weights_EOI, ends_E: x_RI.new_empty(x_RI.shape[0], weights_EOI.shape[1]))
    factors.register_fake(
        lambda dy_RO, x_RI, ends_E: x_RI.new_empty(len(ends_E), dy_RO.shape[1], x_RI.shape[1]),
    )
    register_flop_formula(product_op)(product_flops)
    register_flop_formula(factors_op)(factor_flops)


_describe(masked_product, masked_factors, torch.ops.surogate.grouped_product, torch.ops.surogate.grouped_factors)
_describe(torch_product, torch_factors, torch.ops.surogate.grouped_mm, torch.ops.surogate.grouped_mm_factors)


def _on_gpu(x: Tensor) -> bool:
    """Whether it is on a GPU, or would be: a plan for a GPU that is not here is traced on the CPU."""
    return x.device.type == "cuda" or assumed() is not None


@workspace(torch.ops.surogate.grouped_product)
def _product_bytes(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> int:
    """On a GPU: an expert's product with all rows, and the selection of the one before."""
    rows = x_RI.shape[0] * weights_EOI.shape[1] * x_RI.itemsize
    return 2 * rows if _on_gpu(x_RI) else 0


@workspace(torch.ops.surogate.grouped_factors)
def _factor_bytes(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> int:
    """On a GPU: dy with zeros for the rows of other experts."""
    return dy_RO.numel() * dy_RO.itemsize if _on_gpu(x_RI) else 0


class Grouped(Function):
    """y and its gradients by a product and its factors, such as `masked_product` and `masked_factors`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RI: Tensor,
        ends_E: Tensor,
        weights_EOI: Tensor,
        product: Callable[..., Tensor],
        factors: Callable[..., Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x_RI, ends_E, weights_EOI)
        ctx.product, ctx.factors = product, factors
        return product(x_RI, weights_EOI, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        x_RI, ends_E, weights_EOI = ctx.saved_tensors
        dx_RI = ctx.product(dy_RO, weights_EOI.transpose(1, 2), ends_E) if ctx.needs_input_grad[0] else None
        dweights = ctx.factors(dy_RO, x_RI, ends_E) if ctx.needs_input_grad[2] else None
        return dx_RI, None, dweights, None, None


@op
def grouped_product(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """[R, O] in x's dtype: each row times its expert's weight transposed."""
    found: Tensor = Grouped.apply(x_RI, ends_E, weights_EOI, masked_product, masked_factors)
    return found


def weight_gradient(dy_RO: Tensor, x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """[E, O, I]: the gradient that `grouped_product` gives its weights, by the kernel that the table chooses.

    For the backward of a recipe. A traced graph has no trace of the product itself, whose result is not used.
    """
    with torch.enable_grad():
        leaf = weights_EOI.detach().requires_grad_()
        y_RO = grouped_product(x_RI.detach(), leaf, ends_E)
        (found,) = torch.autograd.grad(y_RO, leaf, dy_RO)
    return found


def torch_grouped(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_product` by torch's grouped products."""
    found: Tensor = Grouped.apply(x_RI, ends_E, weights_EOI, torch_product, torch_factors)
    return found


@cache
def fault(device: torch.device) -> str | None:
    """Why torch's grouped products are not used on the device, or None: some builds give wrong sums for operands that
    are transposed views, without an error (pytorch#186365). Uneven groups, some empty, are compared with plain ones.
    """
    with torch.no_grad(), _disable_current_modes():
        generator = torch.Generator().manual_seed(0)
        rows, inputs, outputs = 600, 96, 176
        ends_E = torch.tensor([0, 70, 70, 71, 520, 600, 600], dtype=torch.int32)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        x, weights, dy = drawn(rows, inputs), drawn(len(ends_E), outputs, inputs), drawn(rows, outputs)
        try:
            found = {
                "x Wᵀ": torch_product(x, weights, ends_E.to(device)),
                "dy W": torch_product(dy, weights.transpose(1, 2), ends_E.to(device)),
                "dyᵀ x": torch_factors(dy, x, ends_E.to(device)),
            }
        except RuntimeError as error:
            return f"torch's grouped product fails: {str(error).splitlines()[0]}"
        x, weights, dy = (t.float().cpu() for t in (x, weights, dy))
        expected = {
            "x Wᵀ": masked_product(x, weights, ends_E),
            "dy W": masked_product(dy, weights.transpose(1, 2), ends_E),
            "dyᵀ x": masked_factors(dy, x, ends_E),
        }
        for what, value in found.items():
            wanted = expected[what]
            if not torch.allclose(value.float().cpu(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max())):
                return f"torch's grouped product gives a wrong {what}"
    return None


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has one launch for all experts there."""
    known = assumed() is not None or torch.cuda.is_available()
    return known and device.type == "cuda" and dtype == torch.bfloat16 and capability(device)[0] in (9, 10)


def usable(weights_EOI: Tensor, ends_E: Tensor) -> bool:
    """Whether torch's grouped products take these operands and are right on this device (`fault`)."""
    if weights_EOI.dtype != torch.bfloat16 or len(ends_E) >= GROUPS:
        return False
    if assumed() is not None:
        return True
    reason = fault(torch.device("cuda", torch.cuda.current_device()))
    if reason is not None:
        log.warning("grouped_product", kernel="reference", reason=reason)
    return reason is None


def _takes(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> bool:
    return usable(weights_EOI, ends_E)


def kernel() -> Kernel:
    """torch's grouped products: on sm_90 and sm_100 one launch, whose sizes stay on the device. Elsewhere torch loops
    over the experts and waits for their sizes, so no CUDA graph could be captured.
    """
    return Kernel(op="grouped_product", name="torch-grouped", function=torch_grouped, supports=supports, takes=_takes)
