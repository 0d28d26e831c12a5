"""Scans against their definition, position by position, in float64; their runs, cuts, steps and traces."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from peak_bytes import PeakBytes
from scan_rows import HEADS, KEYS, LENGTHS, VALUES, borders_of, make, states, with_gradients
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from surogate_core.kernels import scans
from surogate_core.kernels.registry import workspaces
from surogate_testing import op_cases
from surogate_testing.op_cases import random, strided

SCANS = {"gated_delta": scans.gated_delta_scan, "ssd": scans.ssd_scan}
SHARE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2}
"""Largest error of values over the largest value: 3 decimals of fp32 for sums of a chunk, and two roundings to bf16."""
both = pytest.mark.parametrize("name", SCANS)


def run(name: str, rows: list[Tensor], borders: Tensor | None, initial: Tensor | None, **given: Any) -> list[Tensor]:
    y, (last,) = SCANS[name](*rows, borders=borders, initial=None if initial is None else [initial], **given)
    return [y, last]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max() / exact.abs().max())


def _defined(definition: Any, borders: Tensor, rows: list[Tensor], initial: Tensor) -> Any:
    return definition(*rows, borders, initial)


def _in_chunks(name: str, borders: Tensor, chunk: int, rows: list[Tensor], initial: Tensor) -> list[Tensor]:
    return run(name, rows, borders, initial, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@both
def test_values_and_gradients_are_those_of_the_definition(name: str, chunk: int) -> None:
    definition = getattr(op_cases, name)
    for lengths in (LENGTHS, (1, 2, chunk - 1, chunk, chunk + 1)):
        borders, rows, initial = borders_of(lengths), make(name, sum(lengths)), states(len(lengths))
        expected = with_gradients(partial(_defined, definition, borders), rows, initial)
        for layout in (torch.clone, strided):
            given = [layout(t) for t in rows]
            found = with_gradients(partial(_in_chunks, name, borders, chunk), given, initial)
            for a, b in zip(found, expected, strict=True):
                assert error(a, b) < 1e-12


@both
def test_without_initial_states_and_finals(name: str) -> None:
    borders, rows = borders_of(LENGTHS), make(name, sum(LENGTHS))
    y, last = run(name, rows, borders, None)
    zeros, also = run(name, rows, borders, torch.zeros_like(states(len(LENGTHS))))
    assert torch.equal(y, zeros)
    assert torch.equal(last, also)
    leaves = [t.requires_grad_() for t in rows]
    y, none = run(name, leaves, borders, None, finals=False)
    assert none.shape == (0, HEADS, KEYS, VALUES)
    assert not none.requires_grad
    (whole,) = torch.autograd.grad(run(name, leaves, borders, None)[0].sum(), leaves[1])
    assert torch.equal(torch.autograd.grad(y.sum(), leaves[1])[0], whole)
    # A gradient of the states alone.
    assert torch.autograd.grad(run(name, leaves, borders, None)[1].sum(), leaves[1])[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_narrow_dtypes_keep_their_states_wide(name: str, dtype: torch.dtype) -> None:
    lengths = (70, 3, 200)
    borders, rows = borders_of(lengths), make(name, sum(lengths), dtype)
    initial = states(3, torch.float32)
    found = with_gradients(lambda r, i: run(name, r, borders, i), rows, initial)
    exact = with_gradients(lambda r, i: run(name, r, borders, i), [t.double() for t in rows], initial.double())
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    assert [t.dtype for t in found[2:]] == [*[dtype] * 5, torch.float32]
    for a, b in zip(found, exact, strict=True):
        assert error(a, b) < SHARE[dtype]
    # The rounding of y is the only one to bf16.
    assert error(found[1], exact[1]) < SHARE[torch.float32]


@both
def test_a_large_decay_takes_no_digits_from_small_ones_behind_it(name: str) -> None:
    rows = make(name, 40, torch.float32)
    rows[3] = torch.full_like(rows[3], -1e-3)
    rows[3][5] = -1e4
    wide = run(name, [t.double() for t in rows], borders_of((40,)), None)
    for a, b in zip(run(name, rows, borders_of((40,)), None), wide, strict=True):
        assert error(a, b) < SHARE[torch.float32]
    rows[3][5] = float("-inf")
    leaf = rows[3].requires_grad_()
    y, _ = run(name, rows, borders_of((40,)), None)
    assert error(y.detach(), wide[0]) < SHARE[torch.float32]
    assert torch.autograd.grad(y.sum(), leaf)[0].isfinite().all()


def test_equal_keys_without_decay_are_solved_exactly() -> None:
    """Powers of this system have values of 1e17; each value is replaced by the next."""
    rows = make("gated_delta", 64, torch.float32)
    key = torch.zeros_like(rows[1])
    key[..., 0] = 1
    rows[0], rows[1], rows[3], rows[4] = key, key, torch.zeros_like(rows[3]), torch.ones_like(rows[4])
    y, last = run("gated_delta", rows, borders_of((64,)), None)
    torch.testing.assert_close(y, rows[2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(last[0, :, 0], rows[2][-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_a_run_has_its_bits_wherever_it_is(name: str, dtype: torch.dtype) -> None:
    lengths = (1, 17, 0, 70, 3, 17, 129, 64)
    borders, rows, initial = borders_of(lengths), make(name, sum(lengths), dtype), states(len(lengths), torch.float32)
    packed = with_gradients(lambda r, i: run(name, r, borders, i), rows, initial)
    for number, (start, stop) in enumerate(zip(borders.tolist(), borders.tolist()[1:], strict=False)):
        if stop == start:
            assert torch.equal(packed[1][number], initial[number])
            continue
        own = [t[start:stop] for t in rows]
        with_own = [t.detach().requires_grad_() for t in (*own, initial[number : number + 1])]
        y, last = run(name, with_own[:-1], borders_of((stop - start,)), with_own[-1])
        assert torch.equal(y, packed[0][start:stop])
        assert torch.equal(last[0], packed[1][number])
        whole = [random(*t.shape, seed=70 + n).to(t.dtype) for n, t in enumerate(packed[:2])]
        dys = [whole[0][start:stop], whole[1][number : number + 1]]
        *gradients, dinitial = torch.autograd.grad([y, last], with_own, dys)
        assert all(torch.equal(a, b[start:stop]) for a, b in zip(gradients, packed[2:-1], strict=True))
        assert torch.equal(dinitial[0], packed[-1][number])


@both
def test_neighbours_do_not_exist_for_a_run(name: str) -> None:
    borders, rows = borders_of((5, 20, 6)), make(name, 31, torch.float32)
    y, _ = run(name, rows, borders, None)
    for other in (0, -1):
        rows[other][:5], rows[other][25:] = float("nan"), float("inf")
    changed, _ = run(name, rows, borders, None)
    assert torch.equal(changed[5:25], y[5:25])


@both
def test_a_run_may_be_cut_anywhere(name: str) -> None:
    rows, initial = make(name, 40), states(1)
    y, last = run(name, rows, borders_of((40,)), initial, chunk=16)
    for cut in (0, 1, 15, 16, 17, 39, 40):
        first, carried = run(name, [t[:cut] for t in rows], borders_of((cut,)), initial, chunk=16)
        second, behind = run(name, [t[cut:] for t in rows], borders_of((40 - cut,)), carried, chunk=16)
        torch.testing.assert_close(torch.cat((first, second)), y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(behind, last, rtol=1e-12, atol=1e-12)


@both
def test_steps_are_the_chunks(name: str) -> None:
    """Runs of two documents side by side, one row of each at a time; a step has the bits of a row alone."""
    rows, initial = make(name, 60), states(2)
    y, last = run(name, rows, borders_of((30, 30)), initial)
    state, found = initial, []
    for t in range(30):
        pair = [x[[t, 30 + t]] for x in rows]
        stepped, after = run(name, pair, None, state)
        for n in range(2):
            alone, own = run(name, [x[n : n + 1] for x in pair], None, state[n : n + 1])
            assert torch.equal(alone[0], stepped[n])
            assert torch.equal(own[0], after[n])
        found.append(stepped)
        state = after
    torch.testing.assert_close(torch.stack(found, 1).flatten(0, 1), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)
    pair = [x[:2] for x in rows]
    assert all(map(torch.equal, run(name, pair, None, None), run(name, pair, None, torch.zeros_like(initial))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@both
def test_steps_in_slots_have_the_bits_of_steps(name: str, dtype: torch.dtype) -> None:
    """Slots that no row has are untouched. Rows that do not count begin with zeros, and leave zeros."""
    rows, slots, states_S = make(name, 4, dtype), torch.tensor([2, 4, 0, 4]), states(5, torch.float32)
    states_S[-1] = 0
    before, op = states_S.clone(), getattr(scans, f"{name}_step")
    y, after = run(name, rows, None, before[slots])
    found = op(*rows, states_S, slots)
    assert torch.equal(found, y)
    assert torch.equal(states_S[[2, 0]], after[[0, 2]])
    assert torch.equal(states_S[[1, 3]], before[[1, 3]])
    assert not states_S[-1].any()
    assert torch.equal(op(*rows, before, slots, chunk=7), y)


@both
def test_a_trace_is_small_at_every_length(name: str) -> None:
    def trained(*rows: Tensor) -> list[Tensor]:
        y, _ = run(name, list(rows), borders_of((rows[0].shape[0],)), None, finals=False)
        return list(torch.autograd.grad(y.sum(), rows))

    def nodes(length: int) -> int:
        rows = [t.requires_grad_() for t in make(name, length)]
        return len(make_fx(trained, tracing_mode="fake")(*rows).graph.nodes)

    assert nodes(64) == nodes(4096) < 40
    step = make_fx(lambda *given: run(name, list(given[:-1]), None, given[-1]), tracing_mode="fake")
    assert len(step(*make(name, 8), states(8)).graph.nodes) < 50


@both
def test_the_custom_ops_tell_the_truth(name: str) -> None:
    borders = borders_of((2, 0, 3))
    tensors = [strided(t) for t in make("gated_delta", 5, torch.float32)]
    initial, delta = states(3, torch.float32), name == "gated_delta"
    dy, dlast = random(5, HEADS, VALUES, dtype=torch.float32), states(3, torch.float32)
    for given, finals, gradient in ((initial, True, dlast), (initial, False, None), (None, True, dlast)):
        forward = (*tensors, borders, given, finals, 2, delta)
        backward = (dy, gradient, *tensors, borders, given, 2, delta)
        for op, arguments in (("chunked_scan", forward), ("chunked_scan_backward", backward)):
            found = getattr(torch.ops.surogate, op).default
            torch.library.opcheck(found, arguments, test_utils=("test_schema", "test_faketensor"))
    meta = [t.to("meta") for t in make(name, 5, torch.bfloat16)]
    y, last = run(name, meta, borders.to("meta"), None)
    assert (y.dtype, y.shape) == (torch.bfloat16, (5, HEADS, VALUES))
    assert (last.dtype, last.shape) == (torch.float32, (3, HEADS, KEYS, VALUES))


@both
def test_rows_may_be_missing(name: str) -> None:
    initial = states(2).requires_grad_()
    rows = [t.requires_grad_() for t in make(name, 0)]
    y, last = run(name, rows, borders_of((0, 0)), initial)
    assert y.shape == (0, HEADS, VALUES)
    assert torch.equal(last, initial)
    dlast = random(*last.shape, seed=9)
    *none, dinitial = torch.autograd.grad(last, (*rows, initial), dlast)
    assert torch.equal(dinitial, dlast)
    assert all(t.shape == row.shape for t, row in zip(none, rows, strict=True))


@both
def test_multiplications_are_counted(name: str) -> None:
    """What one row needs, and in chunks of a run what the products of a chunk add."""
    assert scans.scan_multiplications(SCANS[name], (4, 5, 7)) == {"gated_delta": 420, "ssd": 280}[name]
    rows = [t.requires_grad_() for t in make(name, 128)]
    with FlopCounterMode(display=False) as counter:
        y, _ = run(name, rows, borders_of((128,)), None, finals=False)
        forward = counter.get_total_flops()
        y.sum().backward()
    inside = 64 * (KEYS + VALUES) + (64 * (2 * KEYS + VALUES + 64) if name == "gated_delta" else 0)
    assert forward == 2 * 128 * (HEADS * inside + scans.scan_multiplications(SCANS[name], (HEADS, KEYS, VALUES)))
    assert counter.get_total_flops() == 4 * forward


@pytest.mark.parametrize("sizes", [(64, 64, 64), (128, 32, 64), (64, 64, 16)])
@both
def test_the_workspace_bounds_what_a_call_holds(name: str, sizes: tuple[int, int, int]) -> None:
    keys, values, chunk = sizes
    rows, delta = 256, name == "gated_delta"
    narrow = [random(rows, 4, size, seed=size, dtype=torch.bfloat16) / 8 for size in (keys, keys, values, values)]
    *tensors, dy = narrow
    tensors += [-random(rows, 4, seed=3, dtype=torch.float32).abs(), random(rows, 4, dtype=torch.float32)]
    tensors.append(borders_of((rows,)))
    given = sum(x.nbytes for x in tensors[:-1])
    for op, function, arguments, results in (
        (torch.ops.surogate.chunked_scan, scans._forward, [*tensors, None, False, chunk, delta], dy.nbytes),
        (torch.ops.surogate.chunked_scan_backward, scans._backward, [dy, None, *tensors, None, chunk, delta], given),
    ):
        # The function below the custom op: a mode sees none of the ops inside one.
        with torch.no_grad(), PeakBytes(dy, *tensors) as counter:
            function._init_fn(*arguments)
        assert 1 <= workspaces[op](*arguments) / (counter.peak - results) < 1.6
