"""torch's grouped products against the plain ones, on a CPU, and when they are chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.kernels import grouped
from surogate_core.kernels.attention import TORCH_PACK
from surogate_core.kernels.native import assuming
from surogate_core.kernels.registry import KernelTable, references, using

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ENDS = torch.tensor([0, 7, 7, 20, 21, 40, 40], dtype=torch.int32)


def run(function: object, x: Tensor, weights: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx and dweights."""
    leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
    y = function(*leaves, ENDS)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (17, 40), (24, 3), (5, 9)])
def test_torchs_products_are_the_plain_ones(inputs: int, outputs: int) -> None:
    """Some experts have no row; sizes that torch's kernels do not take are padded."""
    x, weights, dy = drawn(40, inputs, seed=0), drawn(7, outputs, inputs, seed=1), drawn(40, outputs, seed=2)
    found = run(grouped.torch_grouped, x, weights, dy)
    expected = run(references["grouped_product"].function, x.double(), weights.double(), dy.double())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert a.is_contiguous()
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=1e-2)
    dweights = found[2]
    assert not dweights[[0, 2, 6]].any(), "experts without rows"


def test_views_are_read_where_they_are_and_other_strides_are_copied() -> None:
    x, weights, dy = drawn(40, 24, seed=0), drawn(7, 40, 24, seed=1), drawn(40, 40, seed=2)
    expected = run(grouped.torch_grouped, x, weights, dy)
    apart = torch.cat((x, x), dim=1)[:, :24], torch.cat((weights, weights), dim=2)[..., :24], dy.t().contiguous().t()
    odd = torch.cat((x, x[:, :3]), dim=1)[:, :24], weights.mT.contiguous().mT, dy
    for given in (apart, odd):
        assert all(torch.equal(a, b) for a, b in zip(run(grouped.torch_grouped, *given), expected, strict=True))


def test_the_probe_passes_here_and_refuses_a_product_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped.fault.cache_clear()
    assert grouped.fault(CPU) is None
    right = torch._grouped_mm

    def wrong(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        """As if a transposed operand were not."""
        if b.ndim == 3 and b.stride(1) != 1:
            return torch.zeros_like(right(a, b, offs=offs))
        return right(a, b, offs=offs)

    grouped.fault.cache_clear()
    monkeypatch.setattr(torch, "_grouped_mm", wrong)
    assert grouped.fault(CPU) == "torch's grouped product gives a wrong dy W"
    grouped.fault.cache_clear()
    monkeypatch.setattr(torch, "_grouped_mm", lambda *args, **named: torch.ones(1) @ torch.ones(2))
    assert "fails" in str(grouped.fault(CPU))
    grouped.fault.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "chosen"),
    [
        ((9, 0), torch.bfloat16, "torch-grouped"),
        ((10, 3), torch.bfloat16, "torch-grouped"),
        ((9, 0), torch.float32, "reference"),
        ((8, 9), torch.bfloat16, "reference"),
        ((12, 0), torch.bfloat16, "reference"),
    ],
)
def test_the_choice(capability: tuple[int, int], dtype: torch.dtype, chosen: str) -> None:
    """Torch loops over the experts on the host for other GPUs, which a CUDA graph cannot hold."""
    meta = [torch.empty(*shape, dtype=dtype, device="meta") for shape in ((40, 24), (7, 40, 24))]
    with assuming(capability):
        table = KernelTable.build(CUDA, [TORCH_PACK])
        assert table.choose("grouped_product", dtype, *meta, ENDS).name == chosen


def test_a_chosen_kernel_multiplies_the_experts_of_a_layer() -> None:
    from dataclasses import replace

    kernel = replace(grouped.kernel(), supports=lambda device, dtype: True, takes=lambda *args: True)
    table = KernelTable(device=CPU, kernels=(kernel,))
    x, weights = drawn(40, 24, seed=0), drawn(7, 40, 24, seed=1)
    with using(table):
        (y,) = references["grouped_linears"].function(x, None, None, ENDS, None, [None], None, weights)
    assert torch.equal(y, grouped.torch_grouped(x, weights, ENDS))
    assert table.chosen == {("grouped_product", "bfloat16"): "torch-grouped"}
