"""E4M3 with a scale for each row: scales and codes against their definition, the packed form, and the product."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from surogate_core.formats import fp8_rows
from surogate_core.formats.fp8 import E4M3, E4M3_MAX
from surogate_core.kernels.grouped import masked_product

EXPERTS, ROWS, INPUTS, OUTPUTS = 5, 70, 64, 48


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_scale_is_the_largest_power_of_two_that_fits() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.empty(4000).uniform_(-110, 120, generator=generator))
    amax = torch.cat((sizes, torch.tensor([448.0, 224.0, math.nextafter(448.0, 449.0), 1.75, 7.0, 1.0])))
    scale, inverse = fp8_rows.row_scales(amax)
    assert torch.equal(scale * inverse, torch.ones_like(scale))
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    scaled = amax.double() * scale.double()
    assert (scaled <= E4M3_MAX).all()
    assert (2 * scaled > E4M3_MAX).all()


def test_hostile_rows() -> None:
    """Zeros stay zeros, and a row that is not finite gives NaN instead of a large number."""
    x = normal(5, 16)
    x[0], x[1, 3], x[2, 7] = 0.0, math.inf, math.nan
    x[3] *= 1e-44
    x[4] *= 1e38
    found = fp8_rows.row_values(*fp8_rows.quantise_rows(x), torch.float32)
    assert not found[0].any()
    assert found[1:3].isnan().all()
    assert not found[3].any()
    assert found[4].isfinite().all()
    torch.testing.assert_close(found[4], x[4], rtol=2**-4, atol=1e36)


def test_values_are_exact_in_bf16_and_those_of_the_transpose() -> None:
    x = normal(33, 64) * torch.exp2(torch.arange(33.0) / 8)[:, None]
    by_row, by_column = fp8_rows.quantise_rows(x), fp8_rows.quantise_rows(x.t())
    wide = fp8_rows.row_values(*by_row, torch.float32)
    assert torch.equal(fp8_rows.row_values(*by_row, torch.bfloat16).float(), wide)
    assert ((wide - x).abs() <= 2**-4 * x.abs() + x.abs().amax(1, keepdim=True) * 2**-16).all()
    # Powers of two move no value between the codes; only what underflows differs.
    turned = fp8_rows.row_values(*by_column, torch.float32).t()
    large = x.abs() > x.abs().amax() * 2**-14
    assert large.float().mean() > 0.9
    assert torch.equal(wide[large], turned[large])


def test_packed_weights_are_the_codes_of_both_layouts() -> None:
    weights = normal(EXPERTS, OUTPUTS, INPUTS).bfloat16()
    packed = fp8_rows.pack_experts(weights)
    views = fp8_rows.packed_views(packed, EXPERTS, OUTPUTS, INPUTS)
    for (codes, inverse), layout in zip(views, (weights, weights.transpose(1, 2)), strict=True):
        wanted, scales = fp8_rows.quantise_rows(layout)
        assert codes.data_ptr() % fp8_rows.SIDE == 0
        assert torch.equal(codes.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        assert torch.equal(inverse, scales)
    assert packed.numel() <= 2 * weights.numel() + 4 * EXPERTS * (INPUTS + OUTPUTS) + fp8_rows.HEADER


def operands() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    ends = torch.tensor([0, 3, 3, 60, ROWS], dtype=torch.int32)
    return (
        fp8_rows.quantise_rows(normal(ROWS, INPUTS)),
        fp8_rows.quantise_rows(normal(EXPERTS, OUTPUTS, INPUTS, seed=1)),
        ends,
    )


def test_the_product_is_that_of_the_values() -> None:
    rows, weights, ends = operands()
    exact = masked_product(
        fp8_rows.row_values(*rows, torch.float64), fp8_rows.row_values(*weights, torch.float64), ends
    )
    wide = fp8_rows.emulated_product(rows, weights, ends, torch.float32)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    native = fp8_rows.native_product(*rows, *weights, ends, False)
    assert native.dtype == torch.bfloat16
    torch.testing.assert_close(native.double(), exact, rtol=2**-8, atol=1e-5)


def test_torch_takes_the_operands_of_the_native_product() -> None:
    """The shapes and strides that torch's own check of its grouped product asks for; no group has a multiple of 16."""
    rows, weights, ends = operands()
    packed = fp8_rows.packed_views(fp8_rows.pack_experts(normal(EXPERTS, OUTPUTS, INPUTS)), EXPERTS, OUTPUTS, INPUTS)
    dys = fp8_rows.quantise_rows(normal(ROWS, OUTPUTS))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for x, w in ((rows, weights), (rows, packed[0]), (dys, packed[1])):
            (codes, inverse), (codes_w, inverse_w) = (tuple(mode.from_tensor(t) for t in pair) for pair in (x, w))
            found = torch._scaled_grouped_mm(
                codes, codes_w.transpose(1, 2), inverse, inverse_w, offs=ends, out_dtype=torch.bfloat16
            )
            assert found.shape == (ROWS, codes_w.shape[1])


def test_which_sides_fit() -> None:
    assert fp8_rows.fits(128, 2048, 768)
    assert not fp8_rows.fits(128, 2048, 24)
    assert not fp8_rows.fits(1024, 2048, 768)


@pytest.mark.gpu
def test_the_native_product_on_a_gpu() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only SM90 has grouped FP8 products with a scale for each row")
    rows, weights, ends = operands()
    here = [t.cuda() for t in (*rows, *weights, ends)]
    wanted = fp8_rows.native_product(*rows, *weights, ends, False).float()
    for fast in (False, True):
        found = fp8_rows.native_product(*here, fast)
        assert torch.equal(found, fp8_rows.native_product(*here, fast))
        torch.testing.assert_close(found.float().cpu(), wanted, rtol=2**-6, atol=2**-6 * float(wanted.abs().max()))
    assert rows[0].dtype == E4M3


@pytest.mark.slow
def test_compiled_codes_are_the_same() -> None:
    x = (normal(64, 256) * torch.exp2(torch.arange(64.0) - 32)[:, None]).bfloat16()
    x[3], x[5, 1] = 0.0, math.inf
    plain, compiled = fp8_rows.quantise_rows(x), torch.compile(fp8_rows.quantise_rows, fullgraph=True)(x)
    finite = torch.arange(64) != 5
    assert torch.equal(plain[0].view(torch.uint8)[finite], compiled[0].view(torch.uint8)[finite])
    torch.testing.assert_close(compiled[1], plain[1], rtol=0, atol=0, equal_nan=True)
