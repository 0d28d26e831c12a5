"""torch's grouped products against the plain ones, on a CPU, and when they are chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import structlog.testing
import torch
from torch import Tensor

from surogate_core.kernels import grouped
from surogate_core.kernels.building.native import assuming
from surogate_core.kernels.experts import grouped_linears  # noqa: F401 - registers the op
from surogate_core.kernels.registry import KernelTable, references, using
from surogate_core.kernels.torch_pack import TORCH_PACK

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ENDS = torch.tensor([0, 7, 7, 20, 21, 40, 40], dtype=torch.int32)


def run(function: object, x: Tensor, weights: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx and dweights."""
    leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
    y = function(*leaves, ENDS)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_rows_behind_the_last_experts_are_in_no_sum() -> None:
    """They may be NaN, in x and in dy."""
    x, dy = drawn(40, 24, seed=0), drawn(40, 16, seed=1)
    wanted = grouped.masked_factors(dy, x, ENDS)
    x, dy = (torch.cat((t, t.new_full((5, t.shape[1]), torch.nan))) for t in (x, dy))
    for factors in (grouped.masked_factors, grouped.torch_factors):
        torch.testing.assert_close(factors(dy, x, ENDS), wanted, rtol=1e-2, atol=1e-2)
    found = grouped.factors_by_masks(dy, x, ENDS, torch.empty_like(wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


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


def test_no_sum_goes_over_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch's kernel does for an expert without rows, it is not asked."""
    right, asked = torch._grouped_mm, []

    def watched(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        assert offs[0] > 0
        assert (offs.diff() > 0).all()
        assert offs.dtype == torch.int32
        asked.append(len(b))
        return right(a, b, offs=offs)

    monkeypatch.setattr(torch, "_grouped_mm", watched)
    dy, x = drawn(40, 24, seed=0), drawn(40, 16, seed=1)
    for ends in (ENDS, torch.tensor([40, 40, 40], dtype=torch.int32), torch.tensor([0, 0, 40], dtype=torch.int32)):
        expected = grouped.masked_factors(dy.double(), x.double(), ends)
        torch.testing.assert_close(grouped.torch_factors(dy, x, ends).double(), expected, rtol=2e-2, atol=1e-2)
    assert asked == [40 + grouped.ZEROS * experts for experts in (7, 3, 3)], "the same size for all loads"


def test_values_that_are_not_finite_stay_with_their_expert() -> None:
    dy, x = drawn(40, 24, seed=0), drawn(40, 16, seed=1)
    dy[10], x[39] = float("nan"), float("inf")
    finite = grouped.torch_factors(dy, x, ENDS).isfinite().flatten(1).all(1)
    assert finite.tolist() == [True, True, True, False, True, False, True]


@pytest.fixture
def fault() -> Iterator[Callable[..., str | None]]:
    """`grouped.fault`, which remembers nothing of other tests."""
    grouped.fault.cache_clear()
    yield grouped.fault
    grouped.fault.cache_clear()


def test_the_probe_passes_here_and_refuses_a_product_that_is_wrong(
    fault: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fault(CPU) is None
    assert fault(CPU, factors=True) is None
    right = torch._grouped_mm

    def wrong(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        """As if a transposed operand were not."""
        if b.ndim == 3 and b.stride(1) != 1:
            return torch.zeros_like(right(a, b, offs=offs))
        return right(a, b, offs=offs)

    grouped.fault.cache_clear()
    monkeypatch.setattr(torch, "_grouped_mm", wrong)
    assert fault(CPU) == "torch's grouped product gives a wrong dy W"
    assert fault(CPU, factors=True) is None
    grouped.fault.cache_clear()
    monkeypatch.setattr(torch, "_grouped_mm", lambda *args, **named: torch.ones(1) @ torch.ones(2))
    assert "fails" in str(fault(CPU))


def test_a_fault_is_logged_once(fault: Callable[..., str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch._grouped_mm

    def wrong(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        return right(a, b, offs=offs) * (float("nan") if b.ndim == 2 else 1)

    monkeypatch.setattr(torch, "_grouped_mm", wrong)
    with structlog.testing.capture_logs() as logs:
        assert fault(CPU) is None
        assert [fault(CPU, factors=True) for _ in range(3)] == ["torch's grouped product gives a wrong dyᵀ x"] * 3
    assert [entry["kernel"] for entry in logs] == ["reference"]


def test_a_fault_of_the_gradient_of_weights_matters_only_where_they_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(grouped, "fault", lambda device, *, factors: "wrong" if factors else None)
    weights = drawn(7, 40, 24, seed=1)
    assert grouped.usable(weights, ENDS)
    assert not grouped.usable(weights, ENDS, factors=True)


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
