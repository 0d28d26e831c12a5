"""The products of experts: each range of sorted rows times its expert's weight, and their gradients.

Shape suffixes: E experts, R rows in the order of their experts, I inputs, O outputs; expert e has the rows up to
``ends[e]``, from the end of the expert before it.
"""

from __future__ import annotations

import math
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
from surogate_core.kernels.building.native import assumed, capability
from surogate_core.kernels.registry import op, workspace

GROUPS = 1024
"""torch's grouped products take fewer experts than this."""
ALIGNED = 8
"""Sides of torch's operands are multiples of this: 16 bytes of bf16."""
ZEROS = 8
"""Rows of zeros that each expert gets where a sum goes over its rows, so that none has no row."""

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
    return factors_by_masks(dy_RO, x_RI, ends_E, found)


def factors_by_masks(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor, found: Tensor) -> Tensor:
    """`masked_factors` into `found`, without waiting for the device."""
    # Rows behind the last expert's may be NaN, so zeros in dy alone would not do.
    x_RI = torch.where((torch.arange(len(x_RI), device=x_RI.device) < ends_E[-1])[:, None], x_RI, 0.0)
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


def _with_zeros(ends_E: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(row to take for each of R + `ZEROS`·E places, places of zeros, ends) with `ZEROS` zeros behind each expert's
    rows. Sizes are the same for all loads, and nothing waits for the device.
    """
    count, wide_E = len(ends_E), ends_E.long()
    numbers_E = torch.arange(count, device=ends_E.device)
    starts_E = wide_E + ZEROS * numbers_E
    places = torch.arange(rows + ZEROS * count, device=ends_E.device)
    expert = torch.searchsorted(starts_E + ZEROS, places, right=True)
    zeros = starts_E[:, None] + torch.arange(ZEROS, device=ends_E.device)
    return (places - ZEROS * expert).clamp(0, max(rows - 1, 0)), zeros.flatten(), (starts_E + ZEROS).int()


@torch.library.custom_op("surogate::grouped_mm_factors", mutates_args=())
def torch_factors(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """`masked_factors` by torch's grouped product.

    torch does not say what its kernels do for a sum over no rows, so every expert gets some that are zeros.
    """
    outputs, inputs = dy_RO.shape[1], x_RI.shape[1]
    row_P, zeros, ends_E = _with_zeros(ends_E, len(x_RI))
    dy_PO, x_PI = (_aligned(t).index_select(0, row_P).index_fill_(0, zeros, 0) for t in (dy_RO, x_RI))
    found: Tensor = torch._grouped_mm(dy_PO.t(), x_PI, offs=ends_E)
    wanted = found[:, :outputs, :inputs]
    return wanted if wanted.is_contiguous() else wanted.contiguous()


def describe(product: Any, factors: Any, product_op: Any, factors_op: Any) -> None:
    """Fakes and FLOPs of a pair of ops such as `masked_product` and `masked_factors`."""

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


describe(masked_product, masked_factors, torch.ops.surogate.grouped_product, torch.ops.surogate.grouped_factors)
describe(torch_product, torch_factors, torch.ops.surogate.grouped_mm, torch.ops.surogate.grouped_mm_factors)


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


@workspace(torch.ops.surogate.grouped_mm_factors)
def _torch_factor_bytes(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> int:
    """On a GPU: copies of both with rows of zeros."""
    places = len(x_RI) + ZEROS * len(ends_E)
    return places * (dy_RO.shape[1] + x_RI.shape[1]) * x_RI.itemsize if _on_gpu(x_RI) else 0


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


class _Probe:
    """Operands for the check of torch's grouped products on a device, and the sums that they should give.

    On a GPU there are more tiles than two for each multiprocessor, as in training. Some experts have no row.
    """

    def __init__(self, device: torch.device):
        rows, inputs, outputs = (9600, 1024, 1280) if device.type == "cuda" else (1200, 96, 176)
        half = torch.tensor([0, 70, 70, 71, 520, 600, 600])
        self.ends_E = (torch.cat((half, half + 600)) * (rows // 1200)).int()
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).bfloat16()

        self.x, self.dy = drawn(rows, inputs), drawn(rows, outputs)
        self.weights = drawn(len(self.ends_E), outputs, inputs)

    def wrong(self, factors: bool) -> str | None:
        """The first product whose sums are wrong, of dyᵀ x or of the others."""
        x, dy, weights = self.x, self.dy, self.weights
        views = {"x Wᵀ": (x, weights), "dy W": (dy, weights.transpose(1, 2)), "dyᵀ x": (dy, x)}
        for what, (a, b) in views.items():
            if (what == "dyᵀ x") is not factors:
                continue
            product, plain = (torch_factors, masked_factors) if factors else (torch_product, masked_product)
            wanted = plain(a.float(), b.float(), self.ends_E)
            # Fill the memory that the result probably gets with NaN, to find sums that are not written.
            spoilt = [torch.full(wanted.shape, math.nan, dtype=x.dtype, device=x.device) for _ in range(4)]
            del spoilt
            found = product(a, b, self.ends_E.to(x.device)).float()
            if not torch.allclose(found, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max())):
                return what
        return None


@cache
def fault(device: torch.device, *, factors: bool = False) -> str | None:
    """Why torch's grouped products are not used on the device, or None; logged once.

    Some builds give wrong sums for operands that are transposed views, without an error (pytorch#186365). `factors`:
    whether to check dyᵀ x instead of the products with weights.
    """
    with torch.no_grad(), _disable_current_modes():
        try:
            wrong = _Probe(device).wrong(factors)
            reason = None if wrong is None else f"torch's grouped product gives a wrong {wrong}"
        except RuntimeError as error:
            reason = f"torch's grouped product fails: {str(error).splitlines()[0]}"
    if reason is not None:
        log.warning("grouped_product", kernel="reference", reason=reason)
    return reason


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has one launch for all experts there."""
    known = assumed() is not None or torch.cuda.is_available()
    return known and device.type == "cuda" and dtype == torch.bfloat16 and capability(device)[0] in (9, 10)


def usable(weights_EOI: Tensor, ends_E: Tensor, *, factors: bool = False) -> bool:
    """Whether torch's grouped products take these operands and are right on this device (`fault`).

    `factors`: whether gradients of the weights may be needed too.
    """
    if weights_EOI.dtype != torch.bfloat16 or len(ends_E) >= GROUPS:
        return False
    if assumed() is not None:
        return True
    device = torch.device("cuda", torch.cuda.current_device())
    return fault(device, factors=False) is None and not (factors and fault(device, factors=True))


def _takes(x_RI: Tensor, weights_EOI: Tensor, ends_E: Tensor) -> bool:
    return usable(weights_EOI, ends_E, factors=True)


def kernel() -> Kernel:
    """torch's grouped products: on sm_90 and sm_100 one launch, whose sizes stay on the device. Elsewhere torch loops
    over the experts and waits for their sizes, so no CUDA graph could be captured.
    """
    return Kernel(op="grouped_product", name="torch-grouped", function=torch_grouped, supports=supports, takes=_takes)
