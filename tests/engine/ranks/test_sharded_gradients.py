"""Gradient sums of which every rank keeps a part: the sums of one process, whatever the number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surogate_core.bundles import GradientStore
from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.ranks.embedding_rows import EmbeddingRows
from surogate_core.engine.ranks.owned import Owned, Within
from surogate_core.engine.ranks.sharded_gradients import ShardedGradients
from surogate_core.engine.ranks.sharding import owners
from surogate_core.engine.ranks.stages import Stages
from surogate_core.engine.schedule import EMBED, HEAD, layer_key, training_schedule
from surogate_core.kernels.sums import tree_sum
from surogate_testing.virtual import in_threads

CPU = torch.device("cpu")
LAYERS, UNIT = 3, 256
WORLDS = [1, 2, 4, 8]
RANGES = {"embed": 13 * UNIT, **{layer_key(i): (4 + i) * UNIT for i in range(LAYERS)}}
"""Elements of each piece's range. Layers differ, and so do the parts of their owners."""
SHAPES = {"embed": (52, 64), "weight": (16, 60), "norm": (64,), "head": (50, 64)}


class _Sums:
    """The store of one rank with its shards, for a model whose head is tied or has its own weight."""

    def __init__(self, fabric: Fabric, *, tied: bool, written: bool = False, later: bool = False):
        self.store = ShardedGradients(Stages.over(fabric), CPU, written=written, later=later)
        assert isinstance(self.store, GradientStore)
        self.norms = {key: torch.zeros(SHAPES["norm"]) for key in [*RANGES, HEAD]}
        self.shards = {}
        for key, elements in {**RANGES, **({} if tied else {HEAD: 13 * UNIT})}.items():
            parts = owners((0, elements), fabric.world)
            start, stop = parts[fabric.rank]
            self.shards[key] = torch.full((stop - start,), float("nan"))
            self.store.put_owned(key, Owned(owners=parts, shard=self.shards[key]))
        self.store.put(EMBED, [Within(EMBED, 0, SHAPES["embed"])])
        for i in range(LAYERS):
            key = layer_key(i)
            places = [Within(key, 0, SHAPES["weight"]), Within(key, 4 * UNIT - 64, SHAPES["norm"])]
            self.store.put(key, [places[0], self.norms[key], places[1]])
        weight = Within(EMBED, 0, SHAPES["embed"]) if tied else Within(HEAD, 0, SHAPES["head"])
        self.store.put(HEAD, [self.norms[HEAD], weight])

    def micro_step(self, number: int, *, first: bool, last: bool = True) -> None:
        """Add the gradients of a micro-batch as the schedule does."""
        self.store.begin(first=first, last=last)
        for action in training_schedule(LAYERS, train_embedding=True):
            if action.verb == "reduce":
                sums = self.store.fetch(action.key)
                if action.key == EMBED and self.store.rows is not None:
                    assert not sums
                    (table_VD,) = _gradients(number, EMBED, [torch.empty(SHAPES["embed"])])
                    self.store.rows.keep(torch.arange(len(table_VD)), table_VD)
                    continue
                written = self.store.written(action.key)
                for total, gradient, replaces in zip(sums, _gradients(number, action.key, sums), written, strict=True):
                    total.copy_(gradient) if replaces else total.add_(gradient)
            elif action.kind == "gradients":
                getattr(self.store, action.verb)(action.key)
        self.store.finish()


def _gradients(number: int, key: str, sums: Sequence[Tensor]) -> list[Tensor]:
    """A micro-batch's gradients of a piece, of equal shapes for any number of ranks."""
    drawn = torch.Generator().manual_seed(1000 * number + sum(map(ord, key)))
    return [torch.randn(total.shape, generator=drawn) * 10.0 ** (number % 3) for total in sums]


def _sequential(world: int, micro_batches: int, *, tied: bool, written: bool = False) -> list[dict[str, Tensor]]:
    """Each rank's shards after an optimizer step whose micro-steps are added one after another."""

    def work(fabric: Fabric) -> dict[str, Tensor]:
        sums = _Sums(fabric, tied=tied, written=written)
        for step in range(2):  # what the first one leaves must not be in the second one's
            for i in range(micro_batches // world):
                sums.micro_step(step + i * world + fabric.rank, first=i == 0)
        return sums.shards

    return in_threads(world, work)


def _in_tree(world: int, lanes: int, *, tied: bool) -> dict[str, Tensor]:
    """The sums over all ranks when the micro-steps of a rank are the upper part of the ranks' tree."""

    def work(fabric: Fabric) -> dict[str, Tensor]:
        sums = _Sums(fabric, tied=tied)
        found: dict[str, list[Tensor]] = {key: [] for key in sums.shards}
        for i in range(lanes // world):
            sums.micro_step(i * world + fabric.rank, first=True)
            for key, shard in sums.shards.items():
                found[key].append(shard.clone())
        for key, parts in found.items():
            tree_sum(parts, sums.shards[key])
        return sums.shards

    ranks = in_threads(world, work)
    return {key: torch.cat([shards[key] for shards in ranks]) for key in ranks[0]}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_bits_of_the_sums_do_not_depend_on_the_number_of_ranks(tied: bool) -> None:
    expected = _in_tree(1, 8, tied=tied)
    assert expected[EMBED].abs().min() > 0
    for world in WORLDS[1:]:
        found = _in_tree(world, 8, tied=tied)
        assert all(torch.equal(found[key], expected[key]) for key in expected), world


@pytest.mark.parametrize("world", [*WORLDS, 3])
def test_micro_steps_are_added_to_the_shards(world: int) -> None:
    """Compared with float64: every gradient once, in its owner's shard, the tied head's in the embedding's."""
    batches = 9 if world == 3 else 8
    ranks = _sequential(world, batches, tied=True)
    embed = torch.cat([shards[EMBED] for shards in ranks])
    norm, weight = torch.zeros(SHAPES["norm"]), torch.zeros(SHAPES["embed"])
    expected = torch.zeros(SHAPES["embed"], dtype=torch.float64)
    for number in range(1, batches + 1):
        expected += _gradients(number, HEAD, [norm, weight])[1].double()
        expected += _gradients(number, EMBED, [weight])[0].double()
    torch.testing.assert_close(embed.view(SHAPES["embed"]).double(), expected, rtol=1e-5, atol=1e-3)
    for i in range(LAYERS):
        key = layer_key(i)
        found = torch.cat([shards[key] for shards in ranks])
        parts = [torch.zeros(SHAPES["weight"]), norm, norm]
        totals = [
            torch.stack([_gradients(n, key, parts)[at].double() for n in range(1, batches + 1)]).sum(0) for at in (0, 2)
        ]
        wanted = torch.zeros(RANGES[key], dtype=torch.float64)
        wanted[: totals[0].numel()] = totals[0].view(-1)
        wanted[4 * UNIT - 64 : 4 * UNIT] = totals[1]
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sums_that_are_written_have_the_bits_of_those_that_start_from_zeros(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is between the tensors of a layer, and what another layer has left there, are zeros all the same."""
    expected = _sequential(2, 4, tied=tied)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, float("nan"), **options))
    found = _sequential(2, 4, tied=tied, written=True)
    assert all(torch.equal(found[r][key], expected[r][key]) for r in range(2) for key in expected[r])


class _Counted(Fabric):
    """A fabric that notes the lengths of its exchanges."""

    def __init__(self, fabric: Fabric):
        self._fabric, self.rank, self.world = fabric, fabric.rank, fabric.world
        self.lengths: list[int] = []

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        self.lengths.append(len(parts[0]))
        self._fabric.exchange(parts, received_NK)


def _once(world: int, passes: Sequence[int], *, tied: bool) -> list[tuple[dict[str, Tensor], list[int]]]:
    """Each rank's shards and the lengths of its exchanges after two optimizer steps. `passes`: the micro-steps of each
    pass, whose last one reduces all pieces.
    """

    def work(fabric: Fabric) -> tuple[dict[str, Tensor], list[int]]:
        counted = _Counted(fabric)
        sums = _Sums(counted, tied=tied, written=True, later=True)
        for _ in range(2):  # what the first one leaves must not be in the second one's
            counted.lengths.clear()
            number = fabric.rank
            for begun, steps in enumerate(passes):
                for i in range(steps):
                    sums.micro_step(number, first=not begun and not i, last=i == steps - 1)
                    number += fabric.world
        return sums.shards, counted.lengths

    return in_threads(world, work)


@pytest.mark.parametrize("passes", [(1,), (2,), (4,), (2, 3)], ids=str)
def test_the_embedding_of_a_tied_model_is_reduced_once(passes: tuple[int, ...]) -> None:
    world = 2
    embed, *by_layer = (owners((0, elements), world)[0][1] for elements in RANGES.values())
    layers = sum(by_layer)
    found = _once(world, passes, tied=True)
    expected = torch.zeros(SHAPES["embed"], dtype=torch.float64)
    for number in range(world * sum(passes)):
        norm, weight = torch.zeros(SHAPES["norm"]), torch.zeros(SHAPES["embed"])
        expected += _gradients(number, HEAD, [norm, weight])[1].double() + _gradients(number, EMBED, [weight])[0]
    sums = torch.cat([shards[EMBED] for shards, _ in found]).view(SHAPES["embed"])
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-3)
    for _, lengths in found:
        assert sum(lengths) == len(passes) * embed + sum(passes) * layers


class _Recorded(TorchDispatchMode):
    """What a micro-step computes, to be repeated as a CUDA graph does: Python's state is that of the recording."""

    def __init__(self) -> None:
        super().__init__()
        self._ran: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._ran.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        for func, args, kwargs, found in self._ran:
            again = func(*args, **kwargs)
            # A view is as before; anything else is where later operations read it.
            if isinstance(again, Tensor) and again.data_ptr() != found.data_ptr():
                found.copy_(again)


def _send_rows(sums: _Sums, fabric: Fabric) -> _Sums:
    """Let ranks exchange the rows of the embedding's gradient."""
    shard, width = sums.shards[EMBED], SHAPES["embed"][1]
    sums.store.rows = EmbeddingRows(
        Stages.over(fabric), shard, start=0, tokens=SHAPES["embed"][0], width=width, dtype=torch.float32, device=CPU
    )
    return sums


@pytest.mark.parametrize(
    ("tied", "rows"), [(True, False), (False, False), (False, True)], ids=["tied", "untied", "rows"]
)
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_micro_steps_that_are_captured_by_kind_add_what_they_would(
    steps: int, tied: bool, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind is captured once, in the order of a step and after a warm-up, as `graphs.capture` does."""
    given = {
        key: [torch.zeros(shape) for shape in shapes]
        for key, shapes in [
            (EMBED, [SHAPES["embed"]]),
            *((layer_key(i), [SHAPES["weight"], SHAPES["norm"], SHAPES["norm"]]) for i in range(LAYERS)),
            (HEAD, [SHAPES["norm"], SHAPES["embed" if tied else "head"]]),
        ]
    }
    monkeypatch.setattr(sys.modules[__name__], "_gradients", lambda number, key, sums: given[key])

    def work(fabric: Fabric) -> _Sums:
        sums = _Sums(fabric, tied=tied, written=True, later=True)
        return _send_rows(sums, fabric) if rows else sums

    (sums,) = in_threads(1, work)
    (plain,) = in_threads(1, lambda fabric: _Sums(fabric, tied=tied, written=True))
    order = [(i == 0, i == steps - 1) for i in range(steps)]
    sums.micro_step(0, first=True, last=True)
    for first, last in [kind for kind in order if not kind[0]][:1]:
        sums.micro_step(0, first=first, last=last)
    graphs = {}
    for kind in dict.fromkeys(order):
        with _Recorded() as graphs[kind]:
            sums.micro_step(0, first=kind[0], last=kind[1])
    for step in range(3):
        expected = torch.zeros(SHAPES["embed"], dtype=torch.float64)
        drawn = torch.Generator().manual_seed(step)
        for kind in order:
            for tensor in (tensor for tensors in given.values() for tensor in tensors):
                tensor.copy_(torch.randn(tensor.shape, generator=drawn))
                if step == 1:  # such an optimizer step is skipped
                    tensor.fill_(float("nan"))
            expected += given[EMBED][0].double() + (given[HEAD][1].double() if tied else 0)
            graphs[kind].replay()
            plain.micro_step(0, first=kind[0])
        found = sums.shards[EMBED][: expected.numel()].view(expected.shape)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4, equal_nan=True)
        for key in sums.shards:
            if key != EMBED or not (tied or rows):  # whose sums have another order
                torch.testing.assert_close(sums.shards[key], plain.shards[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_nothing_is_reduced_at_the_end_of_a_micro_step_but_the_last_one(tied: bool) -> None:
    """The first layer and the embedding wait for the next micro-step, and come first in it."""
    first, *others = map(layer_key, range(LAYERS))
    early = [*([] if tied else [HEAD]), *others[::-1]]
    waiting = [first, *([] if tied else [EMBED])]
    whole = [*early, first, EMBED]

    def work(fabric: Fabric) -> list[list[tuple[str, bool]]]:
        sums, reduced = _Sums(fabric, tied=tied, written=True, later=True), []
        reduce = sums.store._reduce

        def noted(piece: str, *, onto: bool) -> None:
            reduced.append((piece, onto))
            reduce(piece, onto=onto)

        sums.store._reduce = noted  # type: ignore[method-assign]
        steps = []
        for begins, ends in [(True, False), (False, False), (False, True), (True, True)]:
            sums.micro_step(fabric.rank, first=begins, last=ends)
            steps.append(reduced.copy())
            reduced.clear()
        return steps

    def all_of(pieces: Sequence[str], *, onto: bool) -> list[tuple[str, bool]]:
        return [(piece, onto and not (tied and piece == EMBED)) for piece in pieces]

    expected = [
        all_of(early, onto=False),
        all_of([*waiting, *early], onto=True),
        all_of([*waiting, *whole], onto=True),
        all_of(whole, onto=False),
    ]
    assert in_threads(2, work) == [expected] * 2


@pytest.mark.parametrize("rows", [False, True], ids=["sums", "rows"])
def test_a_step_that_has_failed_leaves_nothing_to_the_next_one(rows: bool) -> None:
    def work(fabric: Fabric, *, fails: bool) -> dict[str, Tensor]:
        sums = _Sums(fabric, tied=False, written=True, later=True)
        if rows:
            _send_rows(sums, fabric)
        if fails:
            sums.micro_step(7, first=True, last=False)
        for i in range(2):
            sums.micro_step(i, first=i == 0, last=i == 1)
        return sums.shards

    (expected,), (found,) = (in_threads(1, partial(work, fails=fails)) for fails in (False, True))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_pieces_that_share_a_buffer_are_reduced_in_each_micro_step() -> None:
    expected = _sequential(2, 4, tied=False, written=True)

    def work(fabric: Fabric) -> dict[str, Tensor]:
        sums = _Sums(fabric, tied=False, written=True, later=True)
        assert sums.store.staying is None
        for step in range(2):
            for i in range(2):
                sums.micro_step(step + i * 2 + fabric.rank, first=i == 0, last=i == 1)
        return sums.shards

    found = in_threads(2, work)
    assert all(torch.equal(found[r][key], expected[r][key]) for r in range(2) for key in expected[r])


def test_only_the_shared_tensors_of_layers_are_written() -> None:
    def work(fabric: Fabric) -> list[list[bool]]:
        store = _Sums(fabric, tied=True, written=True).store
        return [store.written(key) for key in (EMBED, layer_key(0), HEAD)]

    assert in_threads(2, work) == [[[False], [True, False, True], [False, False]]] * 2


def test_whole_sums_stay_with_their_rank() -> None:
    def work(fabric: Fabric) -> tuple[Tensor, list[tuple[int, ...]]]:
        sums = _Sums(fabric, tied=True)
        for i in range(2):
            sums.micro_step(i, first=i == 0)
        shapes = [tuple(t.shape) for t in sums.store.fetch("layer 1")]
        return sums.norms["layer 1"], shapes

    parts = [torch.zeros(SHAPES["weight"]), torch.zeros(SHAPES["norm"]), torch.zeros(SHAPES["norm"])]
    expected = _gradients(0, "layer 1", parts)[1] + _gradients(1, "layer 1", parts)[1]
    for found, shapes in in_threads(2, work):
        assert torch.equal(found, expected)
        assert shapes == [SHAPES["weight"], SHAPES["norm"], SHAPES["norm"]]


def test_two_buffers_of_the_largest_layer_and_one_of_the_embedding() -> None:
    def work(fabric: Fabric) -> int:
        sums = _Sums(fabric, tied=False)
        before = sums.store.nbytes()["device"]
        sums.micro_step(0, first=True)
        assert before == 4 * sum(shard.numel() for shard in sums.shards.values())
        return sums.store.nbytes()["device"] - before

    largest, staging = 2 * 6 * UNIT + 13 * UNIT, 2 * owners((0, 13 * UNIT), 2)[0][1]
    assert in_threads(2, work) == [4 * (largest + staging)] * 2


def test_a_third_piece_finds_no_buffer() -> None:
    def work(fabric: Fabric) -> None:
        sums = _Sums(fabric, tied=True)
        sums.store.begin(first=True, last=True)
        sums.store.fetch("layer 0")
        sums.store.fetch("layer 1")
        with pytest.raises(AssertionError, match="no buffer is free for the gradient sums of layer 2"):
            sums.store.fetch("layer 2")

    in_threads(2, work)
