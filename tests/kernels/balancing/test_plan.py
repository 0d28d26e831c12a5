"""The plan that evens out the loads of ranks, against plain Python, and the loads that it leaves."""

from __future__ import annotations

import itertools

import pytest
import torch

from surogate_core.kernels.balancing.plan import LoadBalance, Moves, least_rows, moves

EVEN = LoadBalance(threshold=1.0)


def zipf(experts: int, seed: int) -> list[float]:
    """Shares of the rows that fall with the rank of an expert, whose numbers are drawn."""
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()
    shares = [1 / (1 + place) for place in order]
    return [share / sum(shares) for share in shares]


def hot(experts: int) -> list[float]:
    """30 % of the rows on four experts of one rank."""
    return [0.3 / 4] * 4 + [0.7 / (experts - 4)] * (experts - 4)


def counts(shares: list[float], rows: int) -> torch.Tensor:
    found = [int(share * rows) for share in shares]
    return torch.tensor([found[0] + rows - sum(found), *found[1:]], dtype=torch.int32)


def plain(counts_E: list[int], ranks: int, mean: int, balance: LoadBalance) -> set[tuple[int, int, int, int]]:
    """(expert, helping rank, first row, rows), by a walk along both lines."""
    own = len(counts_E) // ranks
    loads = [sum(counts_E[r * own : (r + 1) * own]) for r in range(ranks)]
    if max(loads) <= balance.threshold * mean:
        return set()
    givers = sorted((r for r in range(ranks) if loads[r] > mean), key=lambda r: (mean - loads[r], r))
    takers = sorted((r for r in range(ranks) if loads[r] < mean), key=lambda r: (loads[r] - mean, r))
    room = {r: mean - loads[r] for r in takers}
    pieces: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for giver in givers:
        excess = loads[giver] - mean
        for expert in sorted(range(giver * own, (giver + 1) * own), key=lambda e: (-counts_E[e], e)):
            first = 0
            while excess and first < counts_E[expert]:
                taker = next(r for r in takers if room[r])
                rows = min(excess, room[taker], counts_E[expert] - first)
                pieces.setdefault((giver, taker), []).append((expert, first, rows))
                first, excess, room[taker] = first + rows, excess - rows, room[taker] - rows
    found = set()
    for (_, taker), parts in pieces.items():
        # A stable sort: the expert that comes first along the line wins.
        for expert, first, rows in sorted(parts, key=lambda part: -part[2])[: balance.given(ranks, own)]:
            if rows >= least_rows(mean):
                found.add((expert, taker, first, rows))
    return found


def listed(plan: Moves, own: int) -> set[tuple[int, int, int, int]]:
    found = set()
    for giver, place, taker in itertools.product(*map(range, plan.rows_oPh.shape)):
        at = giver, place, taker
        if rows := int(plan.rows_oPh[at]):
            found.add((giver * own + int(plan.experts_oPh[at]), taker, int(plan.starts_oPh[at]), rows))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_plan_is_that_of_plain_python(ranks: int) -> None:
    experts, mean = 24, 1000
    generator = torch.Generator().manual_seed(ranks)
    for number in range(20):
        rows = torch.rand(experts, generator=generator).pow(1 + number % 4)
        shares = (rows / rows.sum()).tolist()
        if number % 5 == 0:
            shares = [0.25 if e < 4 else 0.0 for e in range(experts)]
        found = counts(shares, ranks * mean)
        balance = LoadBalance(threshold=(1.0, 1.3)[number % 2], slots=(4, 16)[number % 3 == 0])
        wanted = plain(found.tolist(), ranks, mean, balance)
        assert listed(moves(found, ranks, mean, balance), experts // ranks) == wanted, number


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_loads_are_even_afterwards(ranks: int) -> None:
    """Zipf loads and four hot experts of one rank, of 128 experts with the default number of places."""
    mean, worst = 16384, 0.0
    for shares in (hot(128), *(zipf(128, seed) for seed in range(6))):
        found = counts(shares, ranks * mean)
        loads = found.long().view(ranks, -1).sum(1)
        after = moves(found, ranks, mean, EVEN).loads(loads)
        assert int(after.sum()) == ranks * mean
        assert int(after.max()) <= 1.05 * mean, (ranks, shares[:5])
        worst = max(worst, int(loads.max()) / mean)
    assert worst > 1.25


def test_what_is_even_enough_stays() -> None:
    found = torch.tensor([700, 600, 400, 300])
    assert not moves(found, 2, 1000, LoadBalance(threshold=1.3)).rows_oPh.any()
    plan = moves(found, 2, 1000, LoadBalance(threshold=1.29))
    assert listed(plan, 2) == {(0, 1, 0, 300)}
    assert not moves(torch.tensor([515, 515, 485, 485]), 2, 1000, EVEN).rows_oPh.any(), "30 rows, less than the least"
