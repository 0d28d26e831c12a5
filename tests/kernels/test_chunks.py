"""All runs in one table of chunks, the form for devices whose values the host does not read."""

from __future__ import annotations

import pytest
import torch
from scan_rows import HEADS, LENGTHS, borders_of, make, states, with_gradients
from torch import Tensor
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx

from surogate_core.kernels import scans
from surogate_core.kernels.chunks import Places, Scan

TABLES = [LENGTHS, (0, 0, 66), (66, 0), (1,) * 66, (64, 2)]


@pytest.mark.parametrize("lengths", [*TABLES, (1,), (65, 64, 63)])
def test_each_row_has_a_place(lengths: tuple[int, ...]) -> None:
    rows, borders = sum(lengths), borders_of(lengths)
    for chunk in (1, 4, 64):
        places = Places.of(borders, rows, chunk)
        table = torch.arange(rows)[places.row_PC].masked_fill(~places.real_PC, -1)
        assert torch.equal(table.flatten()[places.place_N], torch.arange(rows))
        assert int(places.real_PC.sum()) == rows
        used = [n for n in lengths if n]
        expected = [min(chunk, n - start) for n in used for start in range(0, n, chunk)]
        sizes = places.real_PC.sum(1)
        assert sizes.tolist() == [*expected, *[0] * (len(sizes) - len(expected))]
        assert int(places.first_P.sum()) == int(places.last_P.sum()) == len(used)
        for number, length in enumerate(lengths):
            assert bool(places.empty_R[number]) == (length == 0)
            if length:
                first, last = int(places.first_R[number]), int(places.last_R[number])
                assert places.first_P[first]
                assert places.last_P[last]
                assert places.run_P[first] == places.run_P[last] == number


class Table(Function):
    """The scan of a table of chunks and its backward."""

    @staticmethod
    def forward(ctx, borders: Tensor, chunk: int, delta: bool, initial: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        ctx.scan = Scan.of(rows, borders, initial, chunk, delta)
        new, leaving = ctx.scan.forward()
        places = ctx.scan.places
        return places.rows(ctx.scan.outputs(new, leaving)), places.finals(leaving, initial, entering=False)

    @staticmethod
    def backward(ctx, dy: Tensor, dfinals: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        scan = ctx.scan
        found, dinitial = scan.backward(scan.places.chunks(dy, scan.v.dtype), dfinals)
        return None, None, None, dinitial, *(scan.places.rows(x) for x in found)


@pytest.mark.parametrize("lengths", TABLES)
@pytest.mark.parametrize("delta", [True, False])
def test_a_table_of_all_runs_gives_what_each_gives_alone(lengths: tuple[int, ...], delta: bool) -> None:
    name, borders, initial = "gated_delta" if delta else "ssd", borders_of(lengths), states(len(lengths))
    rows = make(name, sum(lengths), heads=(HEADS, HEADS))
    inputs = rows if delta else [rows[2], rows[1], rows[0], *rows[3:]]
    op = getattr(scans, name)
    alone = with_gradients(lambda r, i: op(*r, borders, initial=i, finals=True, chunk=16), rows, initial)
    if not delta:
        alone[2], alone[4] = alone[4], alone[2]
    found = with_gradients(lambda r, i: Table.apply(borders, 16, delta, i, *r), inputs, initial)
    for a, b in zip(found, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_no_value_is_read_on_the_host() -> None:
    """Fake tensors have none."""

    def table(borders: Tensor, initial: Tensor, *rows: Tensor) -> list[Tensor]:
        scan = Scan.of(rows, borders, initial, 2, True)
        y = scan.outputs(*scan.forward())
        found, dinitial = scan.backward(y, initial)
        return [scan.places.rows(y), *found, dinitial]

    lengths = (3, 0, 2)
    rows = make("gated_delta", sum(lengths))
    make_fx(table, tracing_mode="fake")(borders_of(lengths), states(len(lengths)), *rows)
