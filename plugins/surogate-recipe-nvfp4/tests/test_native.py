"""What the native products are given, against a description of the layout that is written another way.

The description is cuBLAS's ("1D Block Scaling Factors Layout" and "FP4" in its documentation): scales in
tiles of 128×4, the offset in a tile by a formula, tiles of a row of tiles one after the other; two codes
a byte, the first in the low half. Nothing here has run on FP4 tensor cores.
"""

from __future__ import annotations

import pytest
import torch
from surogate_recipe_nvfp4 import NVFP4Options, native, surogate_recipe
from surogate_recipe_nvfp4.gemm import NVFP4, Coded, Rounded, operand, wide_product
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from surogate_core.plugin import dsl, nvfp4
from surogate_testing import tiny
from surogate_testing.recipes import built

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def offset_of(row: int, block: int, blocks: int) -> int:
    """Where the scale of a row's block lies, counted in scales."""
    tiles_in_a_row = (blocks + 3) // 4
    tile = (row // 128) * tiles_in_a_row + block // 4
    outer, inner = row % 128, block % 4
    return tile * 512 + (outer % 32) * 16 + (outer // 32) * 4 + inner


def decoded(codes: Tensor, scales: Tensor, decode: Tensor) -> Tensor:
    """[R, K] fp64 of packed codes and swizzled scales, element by element."""
    rows, inner = codes.shape[0], 2 * codes.shape[1]
    found, scale_list, code_list = torch.zeros(rows, inner, dtype=torch.float64), scales.tolist(), codes.tolist()
    for r in range(rows):
        for k in range(inner):
            code = (code_list[r][k // 2] >> 4 * (k % 2)) & 15
            value = GRID[code % 8] * (-1 if code >= 8 else 1)
            found[r, k] = value * scale_list[offset_of(r, k // 16, inner // 16)] * decode.item()
    return found


def described_product(
    a_codes: Tensor, a_scales: Tensor, a_decode: Tensor, b_codes: Tensor, b_scales: Tensor, b_decode: Tensor
) -> Tensor:
    """What a product of the described layout is."""
    return (decoded(a_codes, a_scales, a_decode) @ decoded(b_codes, b_scales, b_decode).t()).bfloat16()


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (32, 2), (128, 4), (129, 5), (200, 12), (384, 3)])
def test_scales_lie_where_the_description_says(rows: int, blocks: int) -> None:
    numbers = torch.randint(1, 0x7F, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    scales = numbers.view(torch.float8_e4m3fn)
    found = native.swizzled(scales)
    assert found.dtype == torch.float8_e4m3fn
    assert found.numel() == -(-rows // 128) * -(-blocks // 4) * 512
    expected = torch.zeros(found.numel(), dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            expected[offset_of(row, block, blocks)] = numbers[row, block]
    assert torch.equal(found.view(torch.uint8), expected)
    assert torch.equal(native.unswizzled(found, rows, blocks).view(torch.uint8), numbers)


def test_operands_are_what_the_description_decodes() -> None:
    x = torch.randn(160, 96, generator=torch.Generator().manual_seed(0))
    for how in (
        nvfp4.Operand(four_over_six=True),
        nvfp4.Operand(square=True, four_over_six=True),
        nvfp4.Operand(square=True, transposed=True),
        nvfp4.Operand(transposed=True, rotated=True),
    ):
        coded, rounded = (operand(x, None, how, is_native) for is_native in (True, False))
        assert isinstance(coded, Coded)
        assert isinstance(rounded, Rounded)
        scales = native.swizzled(native.by_row(coded.scales, coded.codes.shape[0]))
        values = decoded(coded.codes, scales, torch.ones(()))
        assert torch.equal(values, rounded.values.double())
        assert coded.decode == rounded.decode


@pytest.mark.parametrize("frozen", [False, True])
def test_native_and_emulated_products_agree(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    """Forward and both gradients, with a product of the described layout in the place of torch's."""
    monkeypatch.setattr(native, "product", described_product)
    settings = {"four_over_six": True, "stochastic": True, "note": ""}
    slot = dsl.LinearSlot(name="q", module="q", inputs=64, outputs=160, bias=False, region="qkv", adapter=None, index=1)
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((32, 64), (160, 64), (32, 160)))
    results = []
    for is_native in (False, True):
        recipe = NVFP4(native=is_native, **settings)  # type: ignore[arg-type]
        traced = dsl.TracedSlot.of(slot, seed=torch.tensor(3, dtype=torch.int32), row=None, packed=frozen)
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = recipe.linear(leaf, recipe.pack(w, slot) if frozen else weight, traced)
        y.backward(dy)
        results.append([y.detach(), leaf.grad, weight.grad])
    for emulated, found in zip(*results, strict=True):
        if emulated is None:
            assert frozen
        else:
            assert found is not None
            assert tiny.relative_error(found, emulated) < 4e-3, "the native product is rounded to bf16"


def test_sides_that_tensor_cores_do_not_take_are_emulated() -> None:
    assert native.fits(4096, 64, 96)
    assert not native.fits(4096, 64, 100)
    recipe = NVFP4(native=True, four_over_six=True, stochastic=False, note="")
    slot = dsl.LinearSlot(name="q", module="q", inputs=40, outputs=24, bias=False, region="qkv", adapter=None, index=1)
    traced = dsl.TracedSlot.of(slot, seed=None, row=None, packed=False)
    y = recipe.linear(torch.randn(20, 40), torch.randn(24, 40), traced)
    assert y.isfinite().all()


@pytest.mark.parametrize(("rows", "columns", "inner"), [(64, 96, 128), (4096, 512, 1024)])
def test_torch_takes_operands_of_these_shapes(rows: int, columns: int, inner: int) -> None:
    """torch's own checks of a scaled product's arguments, which need no GPU."""
    with FakeTensorMode():
        operands = []
        for n in (rows, columns):
            codes = torch.empty(n, inner // 2, dtype=torch.uint8, device="cuda")
            scales = native.swizzled(torch.empty(n, inner // 16, dtype=torch.float8_e4m3fn, device="cuda"))
            operands += [codes, scales, torch.empty((), device="cuda")]
        found = native.scaled_product(*operands)
        assert found.shape == (rows, columns)
        assert found.dtype == torch.bfloat16
        operands[1] = torch.empty(operands[1].numel() // 2, dtype=torch.float8_e4m3fn, device="cuda")
        with pytest.raises(Exception, match=r"(?i)scal"):
            native.scaled_product(*operands)


def test_an_emulated_product_on_a_gpu_is_wide() -> None:
    """Shapes and dtypes alone; torch checks the product's arguments without a GPU."""
    with FakeTensorMode():
        a, b = (torch.empty(n, 48, dtype=torch.bfloat16, device="cuda") for n in (20, 36))
        for found in (wide_product(a, b), torch.mm(a, b.t(), out_dtype=torch.float32)):
            assert found.shape == (20, 36)
            assert found.dtype == torch.float32


def test_the_recipe_prepares_native_products_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    recipe = built(surogate_recipe(), torch.device("cuda"), NVFP4Options(emulate="never"))
    assert isinstance(recipe, NVFP4)
    assert recipe.native
