"""What a rank keeps and sends: the formulas against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.ranks.shares import Shares
from surogate_testing import tiny

UNIT = 256
P = (8 * UNIT, 16 * UNIT, 16 * UNIT, 8 * UNIT)
"""Elements of the embedding, two layers and the head."""
SETTINGS = EngineSettings(device=torch.device("cpu"), tokens=64, borders=2, max_seqlen=64, dtype=torch.bfloat16)


def settings_of(level: int, ranks: int, **keys: Any) -> EngineSettings:
    """`keys`: arguments of `tiny.axes`, or fields of the settings."""
    plan = {"micro_batches": 8} | {name: keys.pop(name) for name in list(keys) if name in tiny.AXES}
    return replace(SETTINGS, axes=tiny.axes(ranks=ranks, zero_level=level, **plan), **keys)


def shares(level: int = 0, ranks: int = 1, *, frozen: int = 0, **keys: Any) -> Shares:
    settings = settings_of(level, ranks, **keys)
    return Shares(settings=settings, decayed=P, undecayed=UNIT, frozen=(100, frozen, frozen, 100))


def test_one_rank_keeps_everything_and_sends_nothing() -> None:
    for level in range(4):
        one = shares(level)
        assert one.masters == one.sums == sum(P) + UNIT
        assert one.copies(123) == 123
        assert one.base(1000) == 1000
        assert (one.partial_sums, one.gathered(from_host=True), one.whole_sums, one.staging) == (0, 0, 0, 0)
        assert one.sent == ()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_levels_keep_less(ranks: int) -> None:
    own = sum(P) // ranks + UNIT
    first, second, third = (shares(level, ranks) for level in (1, 2, 3))
    assert [s.masters for s in (first, second, third)] == [own] * 3
    more = (ranks - 1) * UNIT  # the padding of what all keep
    assert [s.sums for s in (first, second, third)] == [sum(P) + UNIT + more, own + more, own + more]
    assert [s.copies(0) for s in (first, second)] == [2 * (sum(P) + UNIT)] * 2
    assert third.copies(0) == 2 * (16 * UNIT + 32 * UNIT // ranks + UNIT)
    assert (first.whole_sums, third.whole_sums) == (0, 4 * (2 * 16 + 8) * UNIT)
    assert (second.gathered(from_host=False), third.gathered(from_host=False)) == (0, 2 * 2 * 16 * UNIT)
    assert shares(1, ranks, master_dtype=torch.bfloat16).copies(0) == 2 * sum(P), "whole masters are no copies"


@pytest.mark.parametrize("ranks", [2, 4])
def test_level_1_keeps_whole_sums_and_parts_of_weights(ranks: int) -> None:
    weights, first, third = shares(1, ranks, shard_weights=True), shares(1, ranks), shares(3, ranks)
    assert (weights.masters, weights.sums, weights.whole_sums) == (first.masters, first.sums, 0)
    assert (weights.staging, weights.partial_sums) == (first.staging, first.partial_sums)
    assert weights.copies(0) == third.copies(0) < first.copies(0)
    assert weights.gathered(from_host=True) == third.gathered(from_host=True)
    sent, of_first, of_third = ({s.what: s for s in one.sent} for one in (weights, first, third))
    assert sent.keys() == of_third.keys() - {"gradients of the embedding, in the next micro-step"}
    for what, one in sent.items():
        assert one == (of_first if "gradients" in what else of_third)[what], what
    assert shares(1, shard_weights=True).copies(123) == 123, "one rank has nobody to share with"


def test_other_numbers_of_ranks_own_equal_parts_rounded_up() -> None:
    assert shares(1, 3).masters == (3 + 6 + 6 + 3) * UNIT + UNIT
    assert shares(1, 100).masters == 4 * UNIT + UNIT


def test_exact_sums_take_further_sums() -> None:
    whole = sum(P) + UNIT
    assert [shares(0, n, exact=True).partial_sums for n in (1, 2, 4, 8)] == [3 * whole, 2 * whole, whole, 0]
    own = sum(P) // 2 + UNIT
    assert shares(2, 2, exact=True).partial_sums == 2 * own, "of what a rank owns"
    assert shares(2, 2, exact=True, micro_batches=16).partial_sums == 3 * own, "and those of the first tree"
    assert shares(0, 1, exact=True, micro_batches=6).partial_sums == whole
    assert shares(0, 1, exact=True, micro_batches=7).partial_sums == 0


def test_ranks_that_share_rows_may_be_more_than_micro_batches() -> None:
    assert shares(1, 2, context=2, micro_batches=1).partial_sums == 0
    assert shares(0, 4, context=2, micro_batches=6).partial_sums == 0


def test_a_frozen_base_is_shared_out_by_layer() -> None:
    lone, two = shares(0, 1, frozen=10_000, shard_weights=True), shares(0, 2, frozen=10_000, shard_weights=True)
    assert lone.base(20_200) == 20_200
    assert two.base(20_200) == 200 + 2 * 5120, "parts are multiples of 256 bytes"
    assert two.gathered(from_host=False) == 4 * 5120
    assert two.gathered(from_host=True) == 5 * 5120
    (sent,) = [s for s in two.sent if s.how == "gather" and s.beside == "both"]
    assert sent.nbytes == 4 * 2 * 5120, "with the padding of the parts"
    assert sent.calls == 4 * 2, "the last two layers of the forward are the first two of the backward"


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire(ranks: int) -> None:
    def sent(level: int) -> int:
        return sum(s.nbytes for s in shares(level, ranks).sent)

    def others(nbytes: int) -> int:
        return nbytes * (ranks - 1) // ranks

    steps, elements, small = 8 // ranks, sum(P), 2 * others(4 * ranks * UNIT)
    assert sent(0) == 2 * others(4 * elements) + small
    assert sent(1) == small + others(4 * elements) + others(2 * elements)
    assert sent(2) == small + steps * others(4 * elements) + others(2 * elements)
    layers = steps * others(2 * 32 * UNIT)  # two layers, which the backward finds in the buffers
    assert sent(3) == small + steps * others(4 * elements) + others(2 * 16 * UNIT) + layers


def test_one_piece_beside_the_layers_is_sent_once_unless_sums_are_exact() -> None:
    def embedding(level: int, **keys: Any) -> tuple[int, int]:
        settings = settings_of(level, 2, **keys)
        tied = Shares(settings=settings, decayed=(*P[:-1], 0), undecayed=UNIT, frozen=(100, 0, 0, 100))
        (found,) = (s for s in tied.sent if s.what.startswith("gradients of the embedding"))
        return found.nbytes, found.calls

    once, steps = 4 * P[0] // 2, 4
    assert embedding(2) == embedding(3) == embedding(1) == (once, 1)
    for keys in ({"exact": True}, {"varying": True}):
        assert embedding(2, **keys) == (steps * once, steps)
        assert embedding(1, **keys) == (once, 1)


def test_of_two_pieces_beside_the_layers_the_embedding_waits_for_the_next_forward() -> None:
    def embedding(**keys: Any) -> list[tuple[str, int, int]]:
        settings = settings_of(2, 2, **keys)
        apart = Shares(settings=settings, decayed=P, undecayed=UNIT, frozen=(100, 0, 0, 100))
        found = [s for s in apart.sent if s.what.startswith("gradients of the embedding")]
        return [(s.beside, s.nbytes, s.calls) for s in found]

    once = 4 * P[0] // 2
    assert embedding() == [("forward", 3 * once, 3), ("", once, 1)]
    assert embedding(exact=True) == [("", 4 * once, 4)]
    assert embedding(micro_batches=2) == [("", once, 1)]


def test_so_are_its_sums_to_other_replicas() -> None:
    """Where they are not added once in a step: gradients are offloaded."""
    settings = settings_of(3, 4, shard_weights=True, shard_ranks=2)
    tied = Shares(settings=settings, decayed=(*P[:-1], 0), undecayed=UNIT, frozen=(100, 0, 0, 100))
    steps = settings.axes.micro_batches // 4
    assert steps > 1
    for what in ("sums of replicas, reduced", "sums of replicas, gathered"):
        (found,) = (s for s in tied.sent if s.what == what)
        assert found.nbytes == 4 * (P[0] // 2 + steps * sum(P[1:-1]) // 2) // 2
        assert found.calls == 1 + steps * len(P[1:-1])


def test_replicas_keep_a_part_of_their_group_and_send_their_sums() -> None:
    for level in (1, 2, 3):
        eight, two = shares(level, 8, shard_ranks=2), shares(level, 2)
        assert (eight.masters, eight.copies(0), eight.whole_sums) == (two.masters, two.copies(0), two.whole_sums)
        assert eight.gathered(from_host=True) == two.gathered(from_host=True)
    sent = {one.what: one for one in shares(2, 8, shard_ranks=2).sent}
    gradients, sums = sent["gradients of layers and head"], sent["sums of replicas, reduced"]
    assert (gradients.nbytes, gradients.ranks, gradients.stride) == (4 * 40 * UNIT // 2, 2, 1)
    assert (sums.nbytes, sums.ranks, sums.stride, sums.calls) == (4 * 24 * UNIT * 3 // 4, 4, 2, 4)
    assert sent["sums of replicas, gathered"].nbytes == sums.nbytes
    assert (sent["updated weights"].nbytes, sent["updated weights"].ranks) == (2 * 48 * UNIT // 2, 2)
    assert sent["gradients that all keep, reduced"].ranks == 0
    settings = settings_of(2, 4, shard_ranks=2)
    keys: dict[str, Any] = {"settings": settings, "decayed": P, "undecayed": UNIT, "frozen": (0,)}
    each, once = ({s.what: s for s in Shares(**keys, replicas_once=way).sent} for way in (False, True))
    assert each["sums of replicas, reduced"].nbytes == 2 * once["sums of replicas, reduced"].nbytes
    assert once["sums of replicas, reduced"].calls == 1


def test_what_hides_it() -> None:
    beside = {s.what: s.beside for s in shares(3, 2).sent}
    assert beside["gradients of layers and head"] == "backward"
    assert beside["gradients of the embedding, in the next micro-step"] == "forward"
    assert beside["gradients of the embedding"] == ""
    assert beside["updated weights"] == "forward"
    assert beside["weights of layers"] == "both"
    assert {s.beside for s in shares(0, 2).sent} == {""}


def test_gradients_that_all_keep_are_gathered_in_equal_parts() -> None:
    first, none = ({sent.what: sent.nbytes for sent in shares(level, 3).sent} for level in (1, 0))
    assert first["gradients that all keep, gathered"] == 2 * 4 * UNIT, "to two ranks: one unit, and padding for both"
    assert none["gradients that all keep, gathered"] == 2 * 4 * (sum(P) // 3 + UNIT), "3 divides the larger group"
    assert shares(1, 3).sums == sum(P) + 3 * UNIT, "padding included"


def test_weights_are_gathered_in_equal_parts() -> None:
    first, third = ({sent.what: sent.nbytes for sent in shares(level, 3).sent} for level in (1, 3))
    assert first["updated weights"] == 2 * 2 * (3 + 6 + 6 + 3) * UNIT, "to two ranks, in bfloat16"
    assert third["updated weights"] == 2 * 2 * (3 + 3) * UNIT
    steps = 8 // 3
    assert third["weights of layers"] == steps * 2 * 2 * (6 + 6) * UNIT
    assert shares(1, 3).whole_copies == 2 * (3 * (3 + 6 + 6 + 3) + 1) * UNIT, "padding included"
