"""The causal convolution against its definition, position by position, in float64; its runs, cuts, steps and traces."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from scan_rows import borders_of
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from surogate_core.bundles import Kernel
from surogate_core.kernels.convolutions import (
    causal_convolution_multiplications,
    causal_convolution_scan,
    causal_convolution_step,
)
from surogate_core.kernels.registry import KernelTable, references, using
from surogate_testing import op_cases
from surogate_testing.op_cases import random, strided

LENGTHS = (1, 17, 0, 32, 3, 2, 17, 0)
CHANNELS = 6


def make(rows: int, runs: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, weight, bias, states."""
    tensors = (random(rows, CHANNELS), random(CHANNELS, width, seed=1), random(CHANNELS, seed=2))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [*(t.to(dtype) for t in tensors), random(runs, width - 1, CHANNELS, seed=3, dtype=dtype).to(wide)]


def run(borders: Tensor | None, *tensors: Tensor | None) -> list[Tensor]:
    """(y, states behind the runs) of x, weight, bias and the states before the runs."""
    x, weight, bias, initial = tensors
    assert x is not None
    assert weight is not None
    given = None if initial is None else [initial]
    y, (last,) = causal_convolution_scan(x, borders=borders, initial=given, weight_CW=weight, bias_C=bias)
    return [y, last]


def gradients(found: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    dys = [random(*t.shape, seed=70 + n).to(t.dtype) for n, t in enumerate(found)]
    return list(torch.autograd.grad(found, leaves, dys))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_definition(width: int) -> None:
    borders = borders_of(LENGTHS)
    for layout in (torch.clone, strided):
        leaves = [layout(t).requires_grad_() for t in make(sum(LENGTHS), len(LENGTHS), width)]
        x, weight, bias, initial = leaves
        found, expected = run(borders, *leaves), op_cases.causal_convolution(x, weight, bias, borders, initial)
        torch.testing.assert_close(found, list(expected), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradients(found, leaves), gradients(list(expected), leaves), rtol=1e-12, atol=1e-12)


def test_without_bias_states_and_finals() -> None:
    borders = borders_of(LENGTHS)
    x, weight, bias, initial = make(sum(LENGTHS), len(LENGTHS), 4)
    y, last = run(borders, x, weight, None, None)
    zeros = run(borders, x, weight, torch.zeros_like(bias), torch.zeros_like(initial))
    assert torch.equal(y, zeros[0])
    assert torch.equal(last, zeros[1])
    leaves = [t.requires_grad_() for t in (x, weight)]
    y, (none,) = causal_convolution_scan(x, borders=borders, finals=False, weight_CW=weight)
    assert none.shape == (0, 3, CHANNELS)
    first, second = gradients([y], leaves), gradients(run(borders, x, weight, None, None)[:1], leaves)
    assert all(map(torch.equal, first, second))
    # A gradient of the states alone is that of copies.
    (dx,) = torch.autograd.grad(run(borders, x, weight, None, None)[1].sum(), x)
    assert dx.sum() == last.ne(0).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_summed_wide_and_rounded_once(dtype: torch.dtype) -> None:
    borders = borders_of(LENGTHS)
    leaves = [t.requires_grad_() for t in make(sum(LENGTHS), len(LENGTHS), 4, dtype)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    found, exact = run(borders, *leaves), run(borders, *wide)
    assert [t.dtype for t in found] == [dtype, torch.float32]
    assert torch.equal(found[1].double(), exact[1])
    dys = [random(*y.shape, seed=70 + n).to(y.dtype) for n, y in enumerate(found)]
    small = [found[0], *torch.autograd.grad(found, leaves, dys)]
    large = [exact[0], *torch.autograd.grad(exact, wide, [dy.double() for dy in dys])]
    unit = torch.finfo(dtype).eps / 2
    for a, b in zip(small, large, strict=True):
        assert float(((a - b).abs().max() / b.abs().max()).detach()) <= unit + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_has_its_bits_wherever_it_is(dtype: torch.dtype) -> None:
    borders = borders_of(LENGTHS)
    leaves = [t.requires_grad_() for t in make(sum(LENGTHS), len(LENGTHS), 4, dtype)]
    x, weight, bias, initial = leaves
    found = run(borders, *leaves)
    dx, *_, dinitial = gradients(found, leaves)
    dys = [random(*t.shape, seed=70 + n).to(t.dtype) for n, t in enumerate(found)]
    for number, (start, stop) in enumerate(pairwise(borders.tolist())):
        own = [x[start:stop].detach().requires_grad_(), initial[number : number + 1].detach().requires_grad_()]
        y, last = run(borders_of((stop - start,)), own[0], weight, bias, own[1])
        assert torch.equal(y, found[0][start:stop])
        assert torch.equal(last[0], found[1][number])
        alone = torch.autograd.grad([y, last], own, [dys[0][start:stop], dys[1][number : number + 1]])
        assert torch.equal(alone[0], dx[start:stop])
        assert torch.equal(alone[1][0], dinitial[number])


def test_neighbours_do_not_exist_for_a_run() -> None:
    x, weight, bias, _ = make(31, 3, 4, torch.float32)
    y, _ = run(borders_of((5, 20, 6)), x, weight, bias, None)
    x[:5], x[25:] = float("nan"), float("inf")
    leaf = x.requires_grad_()
    changed, _ = run(borders_of((5, 20, 6)), leaf, weight, bias, None)
    assert torch.equal(changed[5:25], y[5:25])
    (dx,) = torch.autograd.grad(changed[5:25].sum(), leaf)
    assert dx.isfinite().all()
    assert (dx[:5] == 0).all()
    assert (dx[25:] == 0).all()


def test_a_run_may_be_cut_anywhere_to_the_bit() -> None:
    x, weight, bias, initial = make(20, 1, 4, torch.float32)
    y, last = run(borders_of((20,)), x, weight, bias, initial)
    for cut in range(21):
        first, carried = run(borders_of((cut,)), x[:cut], weight, bias, initial)
        second, behind = run(borders_of((20 - cut,)), x[cut:], weight, bias, carried)
        assert torch.equal(torch.cat((first, second)), y)
        assert torch.equal(behind, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    x, weight, bias, initial = make(60, 2, 4, dtype)
    y, last = run(borders_of((30, 30)), x, weight, bias, initial)
    state, found = initial, []
    for t in range(30):
        stepped, state = run(None, x[[t, 30 + t]], weight, bias, state)
        found.append(stepped)
    assert torch.equal(torch.stack(found, 1).flatten(0, 1), y)
    assert torch.equal(state, last)
    assert torch.equal(run(None, x, weight, bias, None)[0], run(torch.arange(61), x, weight, bias, None)[0])


def test_a_kernel_that_knows_no_states_serves_prompts() -> None:
    """The states behind runs are copies of rows."""
    reference, calls = references["causal_convolution"].function, []

    def plain(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        calls.append(tensors)
        return reference(*tensors)

    kernel = Kernel(op="causal_convolution", name="plain", function=plain, supports=lambda device, dtype: True)
    x, weight, bias, _ = make(sum(LENGTHS), len(LENGTHS), 4, torch.float32)
    expected = reference(x, weight, bias, borders_of(LENGTHS), finals=True)
    with using(KernelTable(device=torch.device("cpu"), kernels=(kernel,))):
        found = run(borders_of(LENGTHS), x, weight, bias, None)
    assert len(calls) == 1
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_slots_have_the_bits_of_steps(dtype: torch.dtype) -> None:
    """Slots that no row has are untouched. Rows that do not count begin with zeros, and leave zeros."""
    x, weight, bias, states = make(4, 5, 4, dtype)
    states, slots = states.float(), torch.tensor([2, 4, 0, 4])
    states[-1] = 0
    before = states.clone()
    y, after = run(None, x, weight, bias, before[slots])
    assert torch.equal(causal_convolution_step(x, states, slots, weight_CW=weight, bias_C=bias), y)
    assert torch.equal(states[[2, 0]], after[[0, 2]])
    assert torch.equal(states[[1, 3]], before[[1, 3]])
    assert not states[-1].any()


def test_a_trace_is_small_at_every_length() -> None:
    def trained(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        y, _ = causal_convolution_scan(
            x, borders=borders_of((x.shape[0],)), finals=False, weight_CW=weight, bias_C=bias
        )
        return list(torch.autograd.grad(y.sum(), (x, weight, bias)))

    def nodes(length: int) -> int:
        leaves = [t.requires_grad_() for t in make(length, 1, 4)[:3]]
        return len(make_fx(trained, tracing_mode="fake")(*leaves).graph.nodes)

    assert nodes(64) == nodes(4096) < 40


def test_the_custom_ops_tell_the_truth() -> None:
    borders = borders_of((2, 0, 3))
    x, weight, bias, initial = (strided(t) for t in make(5, 3, 4, torch.float32))
    dy, dlast = random(5, CHANNELS, dtype=torch.float32), random(3, 3, CHANNELS, dtype=torch.float32)
    for b, given, finals, gradient in (
        (bias, initial, True, dlast),
        (None, None, False, None),
        (bias, None, True, dlast),
    ):
        calls = {
            "causal_convolution": (x, weight, b, borders, given, finals),
            "causal_convolution_backward": (dy, gradient, x, weight, b, borders, given),
        }
        for name, arguments in calls.items():
            op = getattr(torch.ops.surogate, name).default
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_rows_may_be_missing() -> None:
    x, weight, bias, initial = (t.requires_grad_() for t in make(0, 2, 4))
    y, last = run(borders_of((0, 0)), x, weight, bias, initial)
    assert y.shape == (0, CHANNELS)
    assert torch.equal(last, initial)
    dx, dweight, dbias, dinitial = gradients([y, last], [x, weight, bias, initial])
    assert dx.shape == (0, CHANNELS)
    assert not dweight.any()
    assert not dbias.any()
    assert torch.equal(dinitial, random(*last.shape, seed=71))


def test_multiplications_are_counted() -> None:
    assert causal_convolution_multiplications(96, 4) == 384
