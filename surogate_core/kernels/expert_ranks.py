"""Experts that several ranks share out: each of C neighbours has E / C of them, and computes them for all tokens.

There are two ways, with the same static shapes in every step, whatever the load:

- `RowsExchange`: a rank sends the row of each choice to the rank of its expert, gets the expert's output back, and adds
  a token's outputs in the order of its choices. Each source's rows are multiplied apart, so every sum is that of one
  rank alone, to the bit.
- `SumsExchange`: every rank gets the tokens of all, and sends back one fp32 sum for each token. So a token that K
  experts compute is sent once, and so are their outputs.

Rows are in places, of which a rank has as many as it may ever need: min(K, E / C) for each token of all ranks. Places
that no row takes follow the others; they are computed and never read.

Shape suffixes: C ranks that share out experts, N tokens, E experts, G = E / C experts of a rank, K experts of a token,
R = N·K rows sorted by expert, P places of a source at a rank, S = C·P places, I features, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.kernels import experts
from surogate_core.kernels.balancing.moved import Moved, balanced, destinations
from surogate_core.kernels.balancing.plan import LoadBalance
from surogate_core.kernels.begun import Trip
from surogate_core.kernels.linked import Linked, all_gather, exchange_rows, own_part
from surogate_core.kernels.ops import wide
from surogate_core.kernels.regions import choice


@dataclass(slots=True)
class ExpertRanks(Linked):
    """The ranks that share out the experts of each layer."""

    rows: bool = False
    """Whether they send `RowsExchange` to each other, not `SumsExchange`."""
    balance: LoadBalance | None = None
    """When ranks compute rows for the experts of others; None: never."""
    moved: Moved | None = None
    """The experts that were moved in the layer that was traced last."""


class ExpertExchange(Protocol):
    """How the rows of a layer's tokens reach the ranks of their experts, and come back."""

    @property
    def ranks(self) -> ExpertRanks:
        """The ranks that share out experts."""

    @property
    def ends(self) -> Sequence[Tensor]:
        """For each of equal parts of the places, whose rows are multiplied apart: where those of each expert end."""

    @property
    def moved(self) -> Moved | None:
        """The experts of which several ranks compute rows."""

    def sent(self, x_NI: Tensor) -> ReceivedRows:
        """What this rank gets of all ranks' tokens for its experts."""

    def combined(self, y_SO: Tensor, weights_NK: Tensor) -> Tensor:
        """[N, O]: the weighted sum of the outputs of each token's experts, of all ranks."""


@dataclass(frozen=True, slots=True)
class ReceivedRows:
    """Rows for the experts of a rank, as `kernels.experts.grouped_linears` takes them."""

    x: Tensor
    """The rows [S, I]; or, with an order, the tokens of all ranks [C·N, I]."""
    order_S: Tensor | None = None
    place_MK: Tensor | None = None

    def rows(self) -> ReceivedRows:
        """The rows themselves."""
        if self.order_S is None or self.place_MK is None:
            return self
        return ReceivedRows(experts.gather_rows(self.x, self.order_S, self.place_MK, parts=True))


def exchange_of(
    experts_NK: Tensor, order_R: Tensor, slot_NK: Tensor, ends_E: Tensor, ranks: ExpertRanks
) -> ExpertExchange:
    """The way of rows that are sorted by expert (`kernels.experts.route`). C divides E."""
    if ranks.rows:
        return RowsExchange.of(experts_NK, order_R, slot_NK, ends_E, ranks)
    return SumsExchange.of(experts_NK, len(ends_E) // ranks.size, ranks)


def taken(x_PI: Tensor, ends_G: Tensor) -> Tensor:
    """[P, 1] bool: the places that a row takes."""
    return (torch.arange(len(x_PI), device=x_PI.device) < ends_G[-1])[:, None]


def biased(y_SO: Tensor, bias_EO: Tensor, way: ExpertExchange) -> Tensor:
    """[S, O]: rows with the bias of their experts, which are this rank's; zeros in places that no row takes."""
    # The places that no row takes are those of one more expert.
    mine_GO = own_part(bias_EO, way.ranks) if way.moved is None else way.moved.of_experts(bias_EO)
    bias_GO, found = torch.nn.functional.pad(mine_GO, (0, 0, 0, 1)), []
    for y_PO, ends_G in zip(y_SO.chunk(len(way.ends)), way.ends, strict=True):
        y_PO = experts.expert_bias(y_PO, bias_GO, torch.cat((ends_G, ends_G.new_full((1,), len(y_PO)))))
        # Their gradient may be NaN.
        found.append(torch.where(taken(y_PO, ends_G), y_PO, 0.0))
    return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True, slots=True)
class RowsExchange:
    """The places of a rank's rows at the ranks of their experts."""

    ranks: ExpertRanks
    order_S: Tensor
    """Place → choice, as `order_R` of `kernels.experts.sort_by_expert`; of a place that no row takes, any."""
    place_NK: Tensor
    """Choice → place."""
    ends_CG: Tensor
    """For each source, where the rows end that it sent to each expert of this rank, and of those that others gave."""
    moved: Moved | None = None

    @classmethod
    def of(
        cls, experts_NK: Tensor, order_R: Tensor, slot_NK: Tensor, ends_E: Tensor, ranks: ExpertRanks
    ) -> RowsExchange:
        """The places of rows that are sorted by expert."""
        own, moved = len(ends_E) // ranks.size, None
        if ranks.balance is not None:
            experts_NK, moved = destinations(experts_NK, slot_NK, ends_E, ranks, ranks.balance)
            ranks.moved, own = moved, own + ranks.balance.taken(ranks.size, own)
            order_R, slot_NK, ends_E = experts.sort_by_expert(experts_NK, own * ranks.size)
        tokens, choices = experts_NK.shape
        places = tokens * min(choices, own)
        with choice():
            ends_CG = ends_E.view(ranks.size, own)
            firsts_C = torch.cat((torch.zeros_like(ends_CG[:1, -1]), ends_CG[:-1, -1]))
            rank_NK = (experts_NK // own).long()
            place_NK = (rank_NK * places + slot_NK - firsts_C[rank_NK]).int()
            rows_CP = firsts_C[:, None] + torch.arange(places, device=order_R.device)
            order_S = order_R[rows_CP.clamp(max=len(order_R) - 1).flatten()]
            received_CG = exchange_rows((ends_CG - firsts_C[:, None]).contiguous(), ranks)
        return cls(ranks, order_S, place_NK, received_CG, moved)

    @property
    def ends(self) -> Sequence[Tensor]:
        """As `ExpertExchange.ends`: the rows of each source."""
        return self.ends_CG.unbind()

    def _exchanged(self, x_SI: Tensor) -> Tensor:
        return exchange_rows(x_SI.unflatten(0, (self.ranks.size, -1)).contiguous(), self.ranks).flatten(0, 1)

    def sent(self, x_NI: Tensor) -> ReceivedRows:
        """As `ExpertExchange.sent`: rows."""
        return ReceivedRows(self._exchanged(experts.gather_rows(x_NI, self.order_S, self.place_NK)))

    def combined(self, y_SO: Tensor, weights_NK: Tensor) -> Tensor:
        """As `ExpertExchange.combined`, in the order of a token's choices."""
        return experts.combine(self._exchanged(y_SO), self.order_S, self.place_NK, weights_NK)


@dataclass(frozen=True, slots=True)
class SumsExchange:
    """The rows of all ranks' tokens that go to this rank's experts."""

    ranks: ExpertRanks
    mine_MK: Tensor
    """[C·N, K]: the number of each choice's expert among those of this rank, and of those that other ranks gave it;
    their count where it is another rank's."""
    order_S: Tensor
    """Place → choice among those of all ranks' tokens."""
    place_MK: Tensor
    """[C·N, K]: choice → place; -1 where the expert is another rank's."""
    ends_G: Tensor
    """Of this rank's experts, and of those that other ranks gave it."""
    moved: Moved | None = None
    part: int = 0
    """Number of this part of the tokens."""

    @classmethod
    def of(cls, experts_NK: Tensor, own: int, ranks: ExpertRanks) -> SumsExchange:
        """Find the rows of a rank that has `own` experts."""
        with choice():
            experts_MK = all_gather(experts_NK.contiguous(), ranks).flatten(0, 1)
        if ranks.balance is not None:
            sorted_R = experts.sort_by_expert(experts_MK, own * ranks.size)
            found, ranks.moved = balanced(experts_MK, *sorted_R, ranks, ranks.balance)
            numbers_MK = torch.searchsorted(found.ends, found.place_MK, right=True)
            mine_MK = torch.where(found.place_MK < 0, len(found.ends), numbers_MK.int())
            return cls(ranks, mine_MK, found.order_S, found.place_MK, found.ends, ranks.moved)
        with choice():
            firsts_C = torch.arange(ranks.size, device=experts_NK.device, dtype=experts_NK.dtype) * own
            mine_MK = experts_MK - own_part(firsts_C, ranks)
            mine_MK = torch.where((mine_MK >= 0) & (mine_MK < own), mine_MK, own)
        return cls(ranks, mine_MK, *_sorted(mine_MK, own))

    def parts(self, count: int) -> list[SumsExchange]:
        """The same of `count` equal parts of each rank's tokens, one after another; none if they have no such."""
        each_CNK = self.mine_MK.unflatten(0, (self.ranks.size, -1))
        if each_CNK.shape[1] % count:
            return []
        experts_MK = [part_CNK.flatten(0, 1) for part_CNK in each_CNK.chunk(count, dim=1)]
        found = [(part_MK, *_sorted(part_MK, len(self.ends_G))) for part_MK in experts_MK]
        return [SumsExchange(self.ranks, *of, self.moved, part) for part, of in enumerate(found)]

    @property
    def ends(self) -> Sequence[Tensor]:
        """As `ExpertExchange.ends`: all rows are multiplied together."""
        return [self.ends_G]

    def sent(self, x_NI: Tensor) -> ReceivedRows:
        """As `ExpertExchange.sent`: tokens."""
        return ReceivedRows(_Gathered.apply(x_NI, self.ranks), self.order_S, self.place_MK)

    def combined(self, y_SO: Tensor, weights_NK: Tensor) -> Tensor:
        """As `ExpertExchange.combined`, in the order of the ranks."""
        return self.summed(
            weights_NK,
            y_SO.dtype,
            lambda weights_MK: experts.combine(y_SO, self.order_S, self.place_MK, weights_MK, parts=True),
        )

    def summed(self, weights_NK: Tensor, dtype: torch.dtype, part: Callable[[Tensor], Tensor]) -> Tensor:
        """[N, O]: what all ranks give for a token. `part`: from the weights of all tokens what this rank gives
        [C·N, O], in fp32.
        """
        weights_MK = _Gathered.apply(weights_NK, self.ranks)
        found: Tensor = _Added.apply(part(weights_MK), self.ranks, dtype)
        return found


def _sorted(mine_MK: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order_S, place_MK, ends_G) of `SumsExchange`, of a rank with `count` experts."""
    with choice():
        # Rows of the experts of other ranks come last, as those of one more expert.
        order_R, slot_MK, ends_G = experts.sort_by_expert(mine_MK, count)
        places = mine_MK.shape[0] * min(mine_MK.shape[1], count)
        return order_R[:places].clone(), torch.where(mine_MK < count, slot_MK, -1), ends_G


def _added(parts_MO: Tensor, ranks: ExpertRanks) -> Tensor:
    """[N, O] fp32: the sum over the ranks, in their order, of their parts of this rank's tokens."""
    return _total(exchange_rows(parts_MO.unflatten(0, (ranks.size, -1)).contiguous(), ranks))


def _total(parts_CNO: Tensor) -> Tensor:
    parts_CNO = wide(parts_CNO)
    total_NO = parts_CNO[0]
    for part_NO in parts_CNO[1:]:
        total_NO = total_NO + part_NO
    return total_NO


class _Gathered(Function):
    """[N, ...] → [C·N, ...]: the tokens of all ranks. The backward adds what they give for each."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, ranks: ExpertRanks) -> Tensor:
        ctx.ranks = ranks
        return all_gather(x_NI.contiguous(), ranks).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_MI: Tensor) -> tuple[Tensor | None, ...]:
        return _added(dx_MI, ctx.ranks).to(dx_MI.dtype), None


class _Added(Function):
    """[C·N, O] fp32 → [N, O]: the sum over the ranks. The backward gives each of them the gradient of all tokens."""

    @staticmethod
    def forward(ctx: Any, parts_MO: Tensor, ranks: ExpertRanks, dtype: torch.dtype) -> Tensor:
        ctx.ranks = ranks
        return _added(parts_MO, ranks).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        return wide(all_gather(dy_NO.contiguous(), ctx.ranks).flatten(0, 1)), None, None


class TokensTrip(Trip):
    """`_Gathered`, [N, I] → [C·N, I], beside what is computed meanwhile."""

    def leave(self, x: Tensor) -> None:
        """As `Trip.leave`."""
        self.gather(x)

    def arrive(self) -> Tensor:
        """As `Trip.arrive`."""
        return self.arrived().flatten(0, 1)

    def leave_back(self, dy: Tensor) -> None:
        """As `Trip.leave_back`."""
        self.exchange(dy)

    def arrive_back(self) -> Tensor:
        """As `Trip.arrive_back`."""
        return _total(self.arrived()).to(self.dtype)


class SumsTrip(Trip):
    """`_Added`, [C·N, O] fp32 → [N, O], beside what is computed meanwhile."""

    def leave(self, x: Tensor) -> None:
        """As `Trip.leave`."""
        self.exchange(x)

    def arrive(self) -> Tensor:
        """As `Trip.arrive`."""
        return _total(self.arrived()).to(self.dtype)

    def leave_back(self, dy: Tensor) -> None:
        """As `Trip.leave_back`."""
        self.gather(dy)

    def arrive_back(self) -> Tensor:
        """As `Trip.arrive_back`."""
        return wide(self.arrived().flatten(0, 1))
