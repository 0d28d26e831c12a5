"""Rows of the embedding's gradient: each rank's part of the table has the sum over all ranks' tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.engine.embedding_rows import EmbeddingRows
from surogate_core.engine.sharding import owners
from surogate_core.engine.stages import Stages
from surogate_core.mesh.virtual import VirtualFabric, in_threads

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = 96


class _Rows:
    """A table of `rows` rows of `width` elements, and what each of `world` ranks adds to it."""

    def __init__(self, world: int, rows: int, width: int, *, device: str, dtype: torch.dtype = torch.float32):
        self.world, self.rows, self.width, self.device, self.dtype = world, rows, width, torch.device(device), dtype
        elements = -(-rows * width // 256) * 256
        self.parts = owners((0, elements), world)
        drawn = torch.Generator().manual_seed(1)
        # Half of the tokens are one of three: most rows are hit many times or never.
        ids_RN = torch.randint(rows, (world, TOKENS), generator=drawn)
        ids_RN[:, ::2] %= 3
        self.ids_RN = ids_RN.to(device)
        self.dx_RND = torch.randn(world, TOKENS, width, generator=drawn).to(device, dtype)
        self.before = torch.randn(elements, generator=drawn).to(device)

    def of(self, fabric: VirtualFabric, shard: Tensor) -> EmbeddingRows:
        start = self.parts[fabric.rank][0]
        more: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return EmbeddingRows(Stages.over(fabric), shard, start=start, tokens=TOKENS, width=self.width, **more)

    def expected(self, *, onto: bool) -> Tensor:
        """[elements] in float64."""
        found = self.before.double() * onto
        table_VD = found[: self.rows * self.width].view(self.rows, self.width)
        for ids_N, dx_ND in zip(self.ids_RN, self.dx_RND, strict=True):
            table_VD.index_put_((ids_N,), dx_ND.double(), accumulate=True)
        return found


def _work(fabric: VirtualFabric, table: _Rows, onto: bool) -> list[Tensor]:
    start, stop = table.parts[fabric.rank]
    found = []
    for _ in range(2):
        shard = table.before[start:stop].clone()
        rows = table.of(fabric, shard)
        rows.keep(table.ids_RN[fabric.rank], table.dx_RND[fabric.rank])
        rows.add(onto=onto)
        found.append(shard)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("onto", [False, True])
@pytest.mark.parametrize(
    ("world", "rows", "width"), [(1, 20, 64), (2, 101, 320), (3, 50, 24), (4, 77, 256), (8, 5, 48)], ids=str
)
def test_each_part_has_the_rows_of_all_ranks(world: int, rows: int, width: int, onto: bool, device: str) -> None:
    """Parts end inside of rows, and the last ones may be empty."""
    table = _Rows(world, rows, width, device=device)
    by_rank = in_threads(world, partial(_work, table=table, onto=onto))
    whole = torch.cat([first for first, _ in by_rank])
    torch.testing.assert_close(whole.double(), table.expected(onto=onto), rtol=1e-5, atol=1e-5)
    for first, second in by_rank:
        assert torch.equal(first, second), "two equal sums have different bits"


@pytest.mark.parametrize("device", DEVICES)
def test_rows_in_16_bits_are_added_in_32(device: str) -> None:
    table = _Rows(2, 6, 64, device=device, dtype=torch.bfloat16)
    by_rank = in_threads(2, partial(_work, table=table, onto=True))
    whole = torch.cat([first for first, _ in by_rank])
    torch.testing.assert_close(whole.double(), table.expected(onto=True), rtol=1e-5, atol=1e-4)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    table = _Rows(2, 40, 256, device="cpu")
    table.ids_RN[1, 5] = 7
    table.dx_RND[1, 5] = float("nan")
    by_rank = in_threads(2, partial(_work, table=table, onto=True))
    table_VD = torch.cat([first for first, _ in by_rank]).view(40, 256)
    assert table_VD[7].isnan().all()
    assert table_VD.isnan().sum() == 256


def test_the_plan_counts_the_buffers() -> None:
    table = _Rows(2, 40, 256, device="cpu", dtype=torch.bfloat16)
    by_rank = in_threads(2, lambda fabric: sum(b.nbytes for b in table.of(fabric, table.before).buffers))
    assert by_rank == [2 * EmbeddingRows.bytes_of_rank(TOKENS, 256, torch.bfloat16)] * 2
