"""Rows of the embedding's gradient: each rank's part of the table has the sum over all ranks' tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rank_engines import UNTIED, engine_of, steps, trained
from torch import Tensor

from surogate_core.engine.planning import assembly as assemblies
from surogate_core.engine.planning.prediction import predict
from surogate_core.engine.ranks import embedding_rows
from surogate_core.engine.ranks.embedding_rows import EmbeddingRows
from surogate_core.engine.ranks.sharding import owners
from surogate_core.engine.ranks.stages import Stages
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads

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


def test_rows_are_added_in_slices_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _Rows(2, 40, 64, device="cpu")
    whole = in_threads(2, partial(_work, table=table, onto=True))
    monkeypatch.setattr(embedding_rows, "AT_ONCE", 10 * 64)
    sliced = in_threads(2, partial(_work, table=table, onto=True))
    torch.testing.assert_close(sliced, whole, rtol=1e-5, atol=1e-5)
    assert EmbeddingRows.bytes_of(2, TOKENS, 64, torch.float32) == 2 * TOKENS * (64 * 4 + 8) + 10 * 64 * 4


# --------------------------------------------------------------------------- in engines


@pytest.mark.parametrize(
    ("config", "level", "few", "count", "rows"),
    [
        (tiny.SMALL_CONFIG, 2, True, 1, 0),
        (UNTIED, 2, False, 3, 0),
        (UNTIED, 2, True, 0, 3),
        (UNTIED, 1, True, 1, 0),
    ],
    ids=["tied", "untied", "untied, few rows", "untied, level 1"],
)
def test_the_plan_knows_how_often_the_embedding_is_reduced(
    config: Mapping[str, Any], level: int, few: bool, count: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have_few_rows(monkeypatch, few)
    added = _watch_rows(monkeypatch)

    def work(fabric: VirtualFabric) -> tuple[int, Sequence[tuple[float, ...]], int]:
        lengths: list[int] = []

        class Watched(VirtualFabric):
            def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
                lengths.append(len(parts[0]))
                super().exchange(parts, received_NK)

        watched = Watched(fabric._ranks, fabric.rank)
        engine = engine_of(watched, micro_batches=6, zero_level=level, exact=False, config=config)
        group = engine.parameters.sharded
        assert group is not None
        steps(engine, 1, micro_batches=6)
        lengths.clear()
        figures = steps(engine, 2, micro_batches=6, start=1)
        layers = sum(part.longest for key, part in group.parts.items() if key.startswith("layer"))
        others = sum(part.longest for key, part in group.parts.items() if key == "head")
        small = sum(parts_NK.shape[1] for parts_NK in engine.parameters.flat.kept_by_all)
        rest = sum(lengths) // 2 - small - times * layers - headed * others
        elements = {key: part.owners[-1][1] - part.owners[0][0] for key, part in group.parts.items()}
        inner = times * sum(n for key, n in elements.items() if key.startswith("layer"))
        return rest // group.parts["embed"].longest, figures, inner + headed * elements.get("head", 0)

    times, headed = 3 if level > 1 else 1, 1 if rows or level == 1 else 3
    keys: dict[str, Any] = {"zero_level": level, "exact": False, "build": tiny.SmallModel, "optimizer": tiny.ADAMW}
    planned = predict(tiny.assembly(config, ranks=2, micro_batches=6, **keys)).sent
    assert sum(s.calls for s in planned if s.what.startswith("gradients of the embedding")) == count
    by_rows = [s for s in planned if s.what.startswith("rows of the embedding")]
    assert sum(s.calls for s in by_rows) == 2 * rows
    assert sum(s.nbytes for s in by_rows) == rows * tiny.TOKENS * (config["hidden_size"] * 4 + 8), "of the other rank"
    (reduced,) = (s for s in planned if s.what == "gradients of layers and head")
    assert reduced.calls == times * config["num_hidden_layers"] + (headed if config is UNTIED else 0)
    by_rank = in_threads(2, work)
    assert [calls for calls, *_ in by_rank] == [count] * 2
    assert reduced.nbytes == 4 * by_rank[0][2] // 2
    assert len(added) == 2 * 3 * rows, "on two ranks, in three steps"
    alone, _ = trained(1, micro_batches=6, config=config)
    torch.testing.assert_close(torch.tensor(by_rank[0][1]), torch.tensor(alone[1:]), rtol=1e-4, atol=0)


def _have_few_rows(monkeypatch: pytest.MonkeyPatch, few: bool = True) -> None:
    """Let the rows of the embedding's gradient be few, or not, whatever the size of the vocabulary."""
    monkeypatch.setattr(assemblies, "ROWS_OF_VOCABULARY", 0 if few else 10**9)


def _watch_rows(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a rank adds rows to earlier ones, each time that it adds some."""
    add, added = EmbeddingRows.add, []

    def watched(self: EmbeddingRows, *, onto: bool) -> None:
        added.append(onto)
        add(self, onto=onto)

    monkeypatch.setattr(EmbeddingRows, "add", watched)
    return added


@pytest.mark.slow_cases("3-2-0-12", "2-3-0-2", "4-2-2-4")
@pytest.mark.parametrize(
    ("world", "level", "shard", "micro_batches"),
    [(3, 2, 0, 12), (2, 3, 0, 2), (4, 3, 0, 12), (4, 2, 2, 4), (4, 3, 2, 12)],
    ids=str,
)
def test_rows_of_the_embedding_give_the_gradients_of_one_rank(
    world: int, level: int, shard: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"micro_batches": micro_batches, "zero_level": level, "config": UNTIED, "count": 3}
    figures, expected = trained(1, **keys)
    _have_few_rows(monkeypatch)
    added = _watch_rows(monkeypatch)
    found, state = trained(world, shard_ranks=shard, **keys)
    assert len(added) == 3 * micro_batches
    again, same = trained(world, shard_ranks=shard, **keys)
    assert again == found
    tiny.ensure_same_bits(same, state, "a second run")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(figures), rtol=1e-5, atol=1e-6)
    (name,) = (n for n in state if "embed" in n and state[n].ndim == 2 and "optimizer" not in n)
    torch.testing.assert_close(state[name], expected[name], rtol=1e-3, atol=1e-4)


WHERE: dict[str, Any] = {"zero_level": 3, "config": UNTIED, "build": tiny.SmallModel, "optimizer": tiny.ADAMW}


def _sends_rows(**changes: Any) -> bool:
    keys = {**WHERE, "ranks": 2, "micro_batches": 4, **changes}
    return tiny.assembly(keys.pop("config"), **keys).sends_rows


@pytest.mark.parametrize(
    "changes",
    [
        {"exact": True},
        {"varying": True},
        {"context": 2},
        {"zero_level": 1},
        {"ranks": 1},
        {"lora": tiny.lora(), "shard_weights": True},
        {"config": tiny.SMALL_CONFIG},
        {"offloader": replace(NO_OFFLOAD, place="host", allocates=True)},
        {"update_on_cpu": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_where_ranks_do_not_exchange_rows(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _have_few_rows(monkeypatch)
    assert _sends_rows()
    assert not _sends_rows(**changes)


def test_rows_are_few_if_those_of_all_ranks_are_half_of_the_vocabulary() -> None:
    wide = {**UNTIED, "vocab_size": 4 * 2 * tiny.TOKENS}
    assert _sends_rows(ranks=4, config=wide)
    assert not _sends_rows(ranks=4, config={**wide, "vocab_size": wide["vocab_size"] - 1})
    assert not _sends_rows(ranks=8, micro_batches=8, config=wide)
    assert _sends_rows(ranks=8, micro_batches=8, config=wide, shard_ranks=4), "those of a replica are few"
