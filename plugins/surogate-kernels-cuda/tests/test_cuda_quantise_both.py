"""FP8 codes of a matrix and of its transpose: codes and largest values bit for bit."""

from __future__ import annotations

import pytest
import surogate_kernels_cuda
import torch
from torch import Tensor

from surogate_core.plugin import compute
from surogate_core.plugin import fp8 as scaled
from surogate_core.service.kernels import KernelTable
from surogate_testing.op_cases import random

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_the_kernel() -> None:
    device = torch.device("cuda")
    if reason := surogate_kernels_cuda.unavailable(device):
        pytest.skip(reason)
    kernel = next(k for k in surogate_kernels_cuda.kernels() if k.op == "quantise_both")
    if not kernel.supports(device, torch.bfloat16):
        pytest.skip("the GPU has no FP8 products")


def values(rows: int, columns: int, kind: str, seed: int) -> Tensor:
    x = random(rows, columns, seed=seed).bfloat16().cuda()
    match kind:
        case "huge":
            return x * 1e30
        case "tiny":
            return x * 1e-30
        case "zero":
            return x * 0
        case "infinite":
            x[3, 5], x[rows - 1, columns - 1] = -torch.inf, torch.inf
        case "nan":
            x[rows - 2, 7] = torch.nan
    return x


@pytest.mark.parametrize("role", [scaled.ACTIVATION, scaled.WEIGHT, scaled.GRADIENT])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "subnormal", "zero", "infinite", "nan"])
def test_codes_of_both_layouts_are_the_references(kind: str, delayed: bool, role: int) -> None:
    from surogate_kernels_cuda.quantise_both import quantise_both

    room = torch.nn.functional.pad(values(384, 640, kind, seed=2), (8, 0), value=9e9)
    if kind == "subnormal":
        room = (room.double() * 1e-39).bfloat16()
    row = torch.tensor([3.7, 9e3, 1e30 if kind == "subnormal" else 0.2], device="cuda") * delayed
    # A view of columns, a transpose, and one that begins off the alignment of a load.
    for x in (room[:, 8:], room[:, 8:].contiguous().t(), room[:, 7:-1]):
        found = quantise_both(x, row, role, 1)
        expected = compute.references["quantise_both"].function(x, row, role, 1)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert a.is_contiguous()
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fill_tiles_is_left_to_the_reference() -> None:
    pack = surogate_kernels_cuda.surogate_kernel_pack()
    table = KernelTable.build(torch.device("cuda"), [pack])
    for shape, name in (((256, 384), "cuda"), ((256, 320), "reference"), ((130, 256), "reference")):
        x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        assert table.choose("quantise_both", x.dtype, x, x[0], scaled.WEIGHT, 0).name == name
