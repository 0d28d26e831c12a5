"""The weights of experts whose rows other ranks compute too: sent before each use, and their gradients sent back.

Shape suffixes: C ranks that share out experts, E experts, G = E / C experts of a rank, P experts that a rank may give
to each other rank, Q = P·(C - 1) experts of other ranks at a rank, L = G + Q, K experts of a token, M tokens of all
ranks, R = M·K rows sorted by expert, S places of a rank's rows, o the rank that an expert belongs to, h one that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.kernels.balancing.plan import LoadBalance, Moves, moves
from surogate_core.kernels.linked import Linked, all_gather, exchanged, own_part, rank_in
from surogate_core.kernels.regions import again, choice
from surogate_core.kernels.registry import workspace

ALIGNED = 16
"""Bytes at whose multiples the parts of what a rank sends begin."""
Parts = Sequence[tuple[int, int]]
"""Where each part of the bytes of several experts begins, and how many bytes of it an expert has. In a part the experts
follow each other.
"""
FIGURES = 4
"""Numbers of `Moved.figures`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenPlaces:
    """Where the rows of a rank are that it computes itself, of its own experts and then of others'."""

    order_S: Tensor
    """Place → choice among those of all ranks' tokens; of a place that no row takes, any."""
    place_MK: Tensor
    """Choice → place; -1 where another rank computes it."""
    ends: Tensor
    """[G + Q]: where the rows of each expert end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The experts that a rank gives to others and gets from them."""

    ranks: Linked
    chosen_CP: Tensor
    """What this rank gives to each: numbers among its own experts."""
    numbers_L: Tensor
    """[G + Q]: the numbers among all of the experts that this rank has now."""
    figures: Tensor
    """[`FIGURES`] fp32: the largest load of a rank by the mean, before and after; the share of the rows that others
    compute; experts that are moved for it."""

    def with_others(self, tensors: Sequence[Tensor], apart: Sequence[bool] = ()) -> Sequence[Tensor]:
        """[G + Q, ...] of each [G, ...]: behind those of this rank's experts those that others gave; where it is
        `apart` [Q, ...], the latter alone.

        The backward returns the gradients, which are added in the order of ranks to those that are here, and fetches
        them again: they are never kept for it. What is apart is frozen.
        """
        apart = list(apart) or [False] * len(tensors)
        with again():
            found: Sequence[Tensor] = _WithOthers.apply(self.chosen_CP, self.ranks.number, apart, *tensors)
        return found

    def packed_with_others(self, packed: Tensor, own: Parts, whole: Parts) -> Tensor:
        """The bytes of G + Q experts of one frozen tensor that has the G of this rank. `own`, `whole`: the parts of
        both. It is never kept for the backward either.
        """
        with again():
            count = len(self.numbers_L) - self.chosen_CP.shape[1] * (self.ranks.size - 1)
            flat = [[number for part in parts for number in part] for parts in (own, whole)]
            return _fetch_packed(packed, *flat, count, self.chosen_CP, self.ranks.number)

    def of_experts(self, bias_EO: Tensor) -> Tensor:
        """[G + Q, O]: of a tensor of all experts the rows of those that this rank has now."""
        found: Tensor = _Rows.apply(bias_EO, self.numbers_L)
        return found


def balanced(
    experts_MK: Tensor, order_R: Tensor, slot_MK: Tensor, ends_E: Tensor, ranks: Linked, balance: LoadBalance
) -> tuple[EvenPlaces, Moved]:
    """(the places of this rank's rows, the moved experts). The rows of all ranks' tokens are sorted by expert
    (`kernels.experts.sort_by_expert`); C divides E.
    """
    counts_E = _counts(ends_E)
    plan = moves(counts_E, ranks.size, experts_MK.numel() // ranks.size, balance)
    order_S, place_MK, ends = _places(plan, counts_E, experts_MK, order_R, slot_MK, ranks)
    # These results alone: the backward could keep whatever they are computed from as well.
    with choice():
        places = EvenPlaces(order_S=order_S.clone(), place_MK=place_MK.int(), ends=ends.int())
    return places, _moved(plan, counts_E, ranks)


def destinations(
    experts_NK: Tensor, slot_NK: Tensor, ends_E: Tensor, ranks: Linked, balance: LoadBalance
) -> tuple[Tensor, Moved]:
    """([N, K] int32: for each choice of this rank's tokens L times the rank that computes it, and the number of its
    expert there; the moved experts). The rows of this rank's tokens are sorted by expert; C divides E.
    """
    own, counts_E = len(ends_E) // ranks.size, _counts(ends_E)
    counts_CE = all_gather(counts_E, ranks)
    total_E = counts_CE.sum(0)
    plan = moves(total_E, ranks.size, experts_NK.numel(), balance)
    # An expert's rows are those of the first rank's tokens, then those of the second's, and so on.
    before_E = own_part(counts_CE.cumsum(0) - counts_CE, ranks)[0]
    expert_R = experts_NK.flatten().long()
    number_R = slot_NK.flatten() + (before_E - ends_E + counts_E)[expert_R]
    moved_RC = _Table.of(plan, own).behind(expert_R, number_R)[1]
    helper_R = (moved_RC * torch.arange(ranks.size, device=expert_R.device)).sum(1)
    owner_R, is_moved_R = expert_R // own, moved_RC.any(1)
    theirs_R = _Table.of(plan, own).number(expert_R, helper_R)
    rank_R = torch.where(is_moved_R, helper_R, owner_R)
    local_R = torch.where(is_moved_R, theirs_R, expert_R - owner_R * own)
    with choice():
        found_NK = (rank_R * (own + balance.taken(ranks.size, own)) + local_R).int().view(experts_NK.shape)
    return found_NK, _moved(plan, total_E, ranks)


def _counts(ends_E: Tensor) -> Tensor:
    return torch.diff(ends_E.long(), prepend=ends_E.new_zeros(1).long())


def _moved(plan: Moves, counts_E: Tensor, ranks: Linked) -> Moved:
    own = len(counts_E) // ranks.size
    chosen_PC, numbers_L = own_part(plan.experts_oPh, ranks)[0], _numbers(plan, own, ranks)
    with choice():
        chosen_CP, numbers_L = chosen_PC.t().contiguous(), numbers_L.clone()
    return Moved(ranks=ranks, chosen_CP=chosen_CP, numbers_L=numbers_L, figures=_figures(plan, counts_E))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A plan by expert and helping rank."""

    own: int
    given: int
    starts_EC: Tensor
    rows_EC: Tensor
    numbers_EC: Tensor
    """The number among the experts that a rank may give to that one."""

    @classmethod
    def of(cls, plan: Moves, own: int) -> _Table:
        given = plan.rows_oPh.shape[1]
        numbers_oPh = torch.arange(given, device=plan.rows_oPh.device)[:, None].expand_as(plan.rows_oPh)
        return cls(
            own=own,
            given=given,
            starts_EC=plan.of_experts(plan.starts_oPh, own),
            rows_EC=plan.of_experts(plan.rows_oPh, own),
            numbers_EC=plan.of_experts(numbers_oPh, own),
        )

    def behind(self, expert_R: Tensor, number_R: Tensor) -> tuple[Tensor, Tensor]:
        """[R, C] of rows by their expert and their number among its rows: how far each is behind the first that a rank
        helps with, and whether that rank computes it.
        """
        behind_RC = number_R[:, None] - self.starts_EC[expert_R]
        return behind_RC, (behind_RC >= 0) & (behind_RC < self.rows_EC[expert_R])

    def number(self, expert_R: Tensor, helper: Tensor) -> Tensor:
        """[R]: the number that the expert has at a rank which helps with it."""
        owner_R = expert_R // self.own
        others_R = owner_R - (owner_R > helper).long()
        return self.own + others_R * self.given + self.numbers_EC[expert_R, helper]


def _me(ranks: Linked, like: Tensor) -> Tensor:
    """[1]: this rank's number."""
    return own_part(torch.arange(ranks.size, device=like.device), ranks)


def _others(ranks: Linked, like: Tensor) -> Tensor:
    """[C - 1]: the numbers of the other ranks."""
    found = torch.arange(ranks.size - 1, device=like.device)
    return found + (found >= _me(ranks, like))


def _to_me(values_oPh: Tensor, ranks: Linked) -> Tensor:
    """[Q]: of values by giver and taker those of what this rank gets."""
    mine_oP = own_part(values_oPh.permute(2, 0, 1).contiguous(), ranks)[0]
    return mine_oP[_others(ranks, mine_oP)].flatten()


def _numbers(plan: Moves, own: int, ranks: Linked) -> Tensor:
    firsts_o11 = torch.arange(ranks.size, device=plan.experts_oPh.device)[:, None, None] * own
    mine_G = _me(ranks, firsts_o11) * own + torch.arange(own, device=firsts_o11.device)
    return torch.cat((mine_G, _to_me(firsts_o11 + plan.experts_oPh, ranks)))


def _figures(plan: Moves, counts_E: Tensor) -> Tensor:
    loads_C, rows = counts_E.view(len(plan.rows_oPh), -1).sum(1), plan.rows_oPh
    total = loads_C.sum()
    largest = (n.max() * len(loads_C) / total for n in (loads_C, plan.loads(loads_C)))
    found = (*largest, rows.sum() / total, (rows > 0).sum())
    return torch.stack([value.float() for value in found])


def _places(
    plan: Moves, counts_E: Tensor, experts_MK: Tensor, order_R: Tensor, slot_MK: Tensor, ranks: Linked
) -> tuple[Tensor, Tensor, Tensor]:
    """What `EvenPlaces` has."""
    own, device = len(counts_E) // ranks.size, counts_E.device
    tokens, choices = experts_MK.shape
    total = experts_MK.numel()
    # At most the mean comes from others, and only to a rank that has fewer.
    places = max(tokens * min(choices, own), total // ranks.size)
    table, me = _Table.of(plan, own), _me(ranks, counts_E)
    kept_G = own_part(counts_E - table.rows_EC.sum(1), ranks)
    rows_L = torch.cat((kept_G, _to_me(plan.rows_oPh, ranks)))
    ends_L = rows_L.cumsum(0)
    first_L = ends_L - rows_L
    # Each row of all ranks, in the order of experts: its expert, its number among the expert's rows.
    expert_R = experts_MK.flatten().long()[order_R.long()]
    number_R = torch.arange(total, device=device) - (counts_E.cumsum(0) - counts_E)[expert_R]
    behind_RC, moved_RC = table.behind(expert_R, number_R)
    gone_R = torch.minimum(behind_RC.clamp(min=0), table.rows_EC[expert_R]).sum(1)
    here_R = (expert_R // own == me) & ~moved_RC.any(1)
    mine_R = moved_RC.gather(1, me.expand(total)[:, None])[:, 0]
    local_R = torch.where(mine_R, table.number(expert_R, me), torch.where(here_R, expert_R - me * own, 0))
    within_R = torch.where(mine_R, behind_RC.gather(1, me.expand(total)[:, None])[:, 0], number_R - gone_R)
    place_R = torch.where(here_R | mine_R, first_L[local_R] + within_R, places)
    order_S = torch.zeros(places + 1, dtype=order_R.dtype, device=device).scatter(0, place_R, order_R)[:places]
    return order_S, torch.where(place_R < places, place_R, -1)[slot_MK.long()], ends_L


class _Rows(Function):
    """Rows of a tensor; the backward is a product, whose sums have a fixed order."""

    @staticmethod
    def forward(ctx: Any, bias_EO: Tensor, numbers_L: Tensor) -> Tensor:
        ctx.save_for_backward(numbers_L)
        ctx.count = len(bias_EO)
        return bias_EO[numbers_L]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dbias_LO: Tensor) -> tuple[Tensor | None, ...]:
        (numbers_L,) = ctx.saved_tensors
        numbers_E = torch.arange(ctx.count, device=numbers_L.device)
        return (numbers_E[:, None] == numbers_L).to(dbias_LO.dtype) @ dbias_LO, None


# -------------------------------------------------------------------------------- the exchange


def _blocks(tensors: Sequence[Tensor], given: int) -> tuple[list[tuple[int, int]], int]:
    """(where each tensor's `given` experts begin and end in what one rank gets, all of its bytes)."""
    found, end = [], 0
    for tensor in tensors:
        start, size = end, given * math.prod(tensor.shape[1:]) * tensor.itemsize
        found.append((start, start + size))
        end = -(-(start + size) // ALIGNED) * ALIGNED
    return found, end


def _parts(buffer_CB: Tensor, tensors: Sequence[Tensor], given: int) -> Iterator[Tensor]:
    """For each tensor the view [C, P, ...] of its experts in what is sent to all ranks, or comes from them."""
    for (start, stop), tensor in zip(_blocks(tensors, given)[0], tensors, strict=True):
        part = buffer_CB[:, start:stop].view(tensor.dtype)
        yield part.unflatten(1, (given, *tensor.shape[1:]))


def _buffer(tensors: Sequence[Tensor], chosen_CP: Tensor) -> Tensor:
    """[C, B] bytes for the experts of all tensors."""
    size, given = chosen_CP.shape
    return torch.empty(size, _blocks(tensors, given)[1], dtype=torch.uint8, device=tensors[0].device)


@torch.library.custom_op("surogate::fetch_experts", mutates_args=())
def _fetch(own: Sequence[Tensor], chosen_CP: Tensor, number: int, apart: Sequence[bool]) -> list[Tensor]:
    """[G, ...] of each → [G + Q, ...], or [Q, ...] where it is apart."""
    found = _room(own, chosen_CP, apart)
    others = [whole[-_taken(chosen_CP) :] for whole in found]
    _fill(others, own, chosen_CP, number)
    for whole, tensor, alone in zip(found, own, apart, strict=True):
        if not alone:
            whole[: len(tensor)].copy_(tensor)
    return found


def _room(own: Sequence[Tensor], chosen_CP: Tensor, apart: Sequence[bool]) -> list[Tensor]:
    taken = _taken(chosen_CP)
    return [t.new_empty(taken if alone else len(t) + taken, *t.shape[1:]) for t, alone in zip(own, apart, strict=True)]


def _fill(taken: Sequence[Tensor], own: Sequence[Tensor], chosen_CP: Tensor, number: int) -> None:
    """Give [G, ...] of each to other ranks, and write what they give into [Q, ...]."""
    (size, given), sent_CB, me = chosen_CP.shape, _buffer(own, chosen_CP), rank_in(number)
    others = [rank for rank in range(size) if rank != me]
    for tensor, part in zip(own, _parts(sent_CB, own, given), strict=True):
        for rank in others:
            torch.index_select(tensor, 0, chosen_CP[rank], out=part[rank])
    received_CB = exchanged(sent_CB, number)
    for whole, part in zip(taken, _parts(received_CB, own, given), strict=True):
        torch.stack([part[rank] for rank in others], out=whole.unflatten(0, (size - 1, given)))


@_fetch.register_fake
def _(own: Sequence[Tensor], chosen_CP: Tensor, number: int, apart: Sequence[bool]) -> list[Tensor]:
    return _room(own, chosen_CP, apart)


def _word(packed: Tensor, *parts: int) -> torch.dtype:
    """The dtype as which bytes are copied."""
    wide = torch.int64.itemsize
    return torch.int64 if all(number % wide == 0 for number in (packed.storage_offset(), *parts)) else torch.uint8


def _views(packed: Tensor, parts: Sequence[int], count: int, word: torch.dtype = torch.uint8) -> list[Tensor]:
    """[count, ...] of each part, whose first bytes and bytes of an expert follow each other in `parts`."""
    starts, sizes = parts[::2], parts[1::2]
    return [packed[a : a + count * n].view(word).view(count, -1) for a, n in zip(starts, sizes, strict=True)]


@torch.library.custom_op("surogate::fetch_packed_experts", mutates_args=())
def _fetch_packed(
    packed: Tensor, own: Sequence[int], whole: Sequence[int], count: int, chosen_CP: Tensor, number: int
) -> Tensor:
    """The bytes of G = `count` experts → those of G + Q; bytes between parts are zeros."""
    found, all_of_them = _room_for(packed, whole, count, chosen_CP).zero_(), count + _taken(chosen_CP)
    word = _word(packed, *own, *whole)
    wholes, parts = _views(found, whole, all_of_them, word), _views(packed, own, count, word)
    _fill([each[count:] for each in wholes], parts, chosen_CP, number)
    for each, part in zip(wholes, parts, strict=True):
        each[:count].copy_(part)
    return found


def _taken(chosen_CP: Tensor) -> int:
    """Q."""
    return chosen_CP.shape[1] * (chosen_CP.shape[0] - 1)


def _room_for(packed: Tensor, whole: Sequence[int], count: int, chosen_CP: Tensor) -> Tensor:
    starts, sizes = whole[::2], whole[1::2]
    return packed.new_empty(max(a + (count + _taken(chosen_CP)) * n for a, n in zip(starts, sizes, strict=True)))


@_fetch_packed.register_fake
def _(packed: Tensor, own: Sequence[int], whole: Sequence[int], count: int, chosen_CP: Tensor, number: int) -> Tensor:
    return _room_for(packed, whole, count, chosen_CP)


@torch.library.custom_op("surogate::return_experts", mutates_args=())
def _return(gradients: Sequence[Tensor], chosen_CP: Tensor, number: int) -> list[Tensor]:
    """[G + Q, ...] of each → [G, ...]: the sum over this rank, and then the others in their order."""
    (size, given), sent_CB, me = chosen_CP.shape, _buffer(gradients, chosen_CP), rank_in(number)
    others, own = [rank for rank in range(size) if rank != me], len(gradients[0]) - given * (size - 1)
    for tensor, part in zip(gradients, _parts(sent_CB, gradients, given), strict=True):
        for rank, gradient in zip(others, tensor[own:].split(given), strict=True):
            part[rank].copy_(gradient)
    received_CB, found = exchanged(sent_CB, number), []
    for tensor, part in zip(gradients, _parts(received_CB, gradients, given), strict=True):
        total = tensor[:own].clone()
        for rank in others:
            # Experts without rows have a gradient of zero, so it does not matter which of equal numbers is added first.
            total.index_add_(0, chosen_CP[rank], part[rank])
        found.append(total)
    return found


@_return.register_fake
def _(gradients: Sequence[Tensor], chosen_CP: Tensor, number: int) -> list[Tensor]:
    size, given = chosen_CP.shape
    return [t.new_empty(len(t) - given * (size - 1), *t.shape[1:]) for t in gradients]


def _sent_bytes(tensors: Sequence[Tensor], chosen_CP: Tensor, *rest: Any) -> int:
    size, given = chosen_CP.shape
    return int(size * _blocks(tensors, given)[1])


@workspace(torch.ops.surogate.fetch_experts)
@workspace(torch.ops.surogate.return_experts)
def _workspace(tensors: Sequence[Tensor], chosen_CP: Tensor, *rest: Any) -> int:
    """What is sent, and what is received."""
    return 2 * _sent_bytes(tensors, chosen_CP)


def _packed_sent_bytes(
    packed: Tensor, own: Sequence[int], whole: Sequence[int], count: int, chosen_CP: Tensor, number: int
) -> int:
    return _sent_bytes(_views(packed, own, count), chosen_CP)


@workspace(torch.ops.surogate.fetch_packed_experts)
def _packed_workspace(*arguments: Any) -> int:
    return 2 * _packed_sent_bytes(*arguments)


SENT: Mapping[Any, Callable[..., int]] = {
    torch.ops.surogate.fetch_experts.default: _sent_bytes,
    torch.ops.surogate.fetch_packed_experts.default: _packed_sent_bytes,
    torch.ops.surogate.return_experts.default: _sent_bytes,
}
"""Op of traced programs → bytes that ranks exchange, given its arguments."""


class _WithOthers(Function):
    @staticmethod
    def forward(ctx: Any, chosen_CP: Tensor, number: int, apart: list[bool], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(chosen_CP)
        ctx.number = number
        found = tuple(_fetch(own, chosen_CP, number, apart))
        # Kernels ask whether a weight is trained, and adapters beside it are fetched with it.
        wanted = ctx.needs_input_grad[3:]
        assert not any(alone and need for alone, need in zip(apart, wanted, strict=True)), "what is apart is frozen"
        ctx.mark_non_differentiable(*(t for t, need in zip(found, wanted, strict=True) if not need))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (chosen_CP,) = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        sent = [g.contiguous() for g, need in zip(gradients, wanted, strict=True) if need]
        found = iter(_return(sent, chosen_CP, ctx.number) if sent else ())
        return None, None, None, *(next(found) if need else None for need in wanted)
