"""The ops of a mixture of experts, each with its plain-PyTorch reference.

Routing is exact: every token goes to its K experts, whatever their load, so there are always R = N·K rows and all
shapes are static. Rows are sorted by expert, and sums have a fixed order. Shape suffixes: N tokens, E experts, K
experts of a token, R = N·K rows in the order of their experts, I inputs, O outputs, L adapter rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.kernels.grouped import grouped_product
from surogate_core.kernels.ops import choice, dropout_mask, wide
from surogate_core.kernels.registry import op


def sort_by_expert(experts_NK: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order_R, slot_NK, ends_E), int32: a stable sort of the rows by expert.

    Row r of the sorted order is choice ``order[r] % K`` of token ``order[r] // K``; `slot` is the inverse. Expert e has
    the rows up to ``ends[e]``, from the end of the expert before it.
    """
    flat_R = experts_NK.flatten()
    order_R = torch.argsort(flat_R, stable=True)
    rows = torch.arange(len(flat_R), device=flat_R.device)
    slot_R = torch.empty_like(order_R).scatter(0, order_R, rows)
    bounds = torch.arange(count, device=flat_R.device, dtype=flat_R.dtype)
    ends_E = torch.searchsorted(flat_R[order_R], bounds, right=True)
    with choice():
        return order_R.int(), slot_R.view(experts_NK.shape).int(), ends_E.int()


LEAST_TOTAL = 1e-20
"""Added to the sum of sigmoids that weights are divided by, as transformers does: it may be zero."""


def route_backward(
    dweights_NK: Tensor,
    logits_NE: Tensor,
    experts_NK: Tensor,
    *,
    renormalise: bool,
    sigmoid: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """[N, E] in the dtype of the logits: their gradient, from the weights' gradient; for kernels of `route` too."""
    if sigmoid:
        return _sigmoid_backward(dweights_NK * scale, logits_NE, experts_NK, renormalise=renormalise)
    assert scale == 1
    probabilities_NE = torch.softmax(wide(logits_NE), dim=-1)
    index_NK = experts_NK.long()
    chosen_NK = probabilities_NE.gather(1, index_NK)
    dchosen_NK = dweights_NK
    if renormalise:
        total_N1 = chosen_NK.sum(dim=-1, keepdim=True)
        weights_NK = chosen_NK / total_N1
        dchosen_NK = (dweights_NK - (dweights_NK * weights_NK).sum(dim=-1, keepdim=True)) / total_N1
    inner_N1 = (chosen_NK * dchosen_NK).sum(dim=-1, keepdim=True)
    # The experts of a token differ, so no two values go to one place.
    dlogits_NE = torch.zeros_like(probabilities_NE).scatter(1, index_NK, dchosen_NK)
    return (probabilities_NE * (dlogits_NE - inner_N1)).to(logits_NE.dtype)


def _sigmoid_backward(dweights_NK: Tensor, logits_NE: Tensor, experts_NK: Tensor, *, renormalise: bool) -> Tensor:
    scores_NE = torch.sigmoid(wide(logits_NE))
    dchosen_NK = dweights_NK
    if renormalise:
        chosen_NK = scores_NE.gather(1, experts_NK.long())
        total_N1 = chosen_NK.sum(dim=-1, keepdim=True) + LEAST_TOTAL
        inner_N1 = (dweights_NK * chosen_NK / total_N1).sum(dim=-1, keepdim=True)
        dchosen_NK = (dweights_NK - inner_N1) / total_N1
    dscores_NE = torch.zeros_like(scores_NE).scatter(1, experts_NK.long(), dchosen_NK)
    return (dscores_NE * scores_NE * (1 - scores_NE)).to(logits_NE.dtype)


def _in_groups(scores_NE: Tensor, groups: int, chosen: int) -> Tensor:
    """[N, E]: the scores within the `chosen` groups whose two best scores have the largest sums, -inf in the others.

    Of equal sums the group with the lowest number comes first.
    """
    parts_NGE = scores_NE.unflatten(1, (groups, -1))
    best_NG = parts_NGE.topk(2, dim=-1).values.sum(-1)
    numbers = torch.sort(best_NG, dim=-1, descending=True, stable=True).indices[:, chosen:]
    absent_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter(1, numbers, True)
    return parts_NGE.masked_fill(absent_NG[..., None], float("-inf")).flatten(1)


class _Route(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NE: Tensor,
        count: int,
        renormalise: bool,
        sigmoid: bool,
        correction_E: Tensor | None,
        groups: int,
        group_choices: int,
        scale: float,
    ) -> tuple[Tensor, ...]:
        logits = wide(logits_NE)
        scores_NE = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, dim=-1)
        ranked_NE = scores_NE if correction_E is None else scores_NE + wide(correction_E)
        if group_choices < groups:
            ranked_NE = _in_groups(ranked_NE, groups, group_choices)
        # A stable sort: of equal probabilities the expert with the lowest number comes first.
        numbers = torch.sort(ranked_NE, dim=-1, descending=True, stable=True).indices
        with choice():
            experts_NK = numbers[:, :count].int()
        # Not the sort's values, which a recomputation would sort again for.
        weights_NK = scores_NE.gather(1, experts_NK.long())
        if renormalise:
            total_N1 = weights_NK.sum(dim=-1, keepdim=True)
            weights_NK = weights_NK / (total_N1 + LEAST_TOTAL if sigmoid else total_N1)
        if scale != 1:
            weights_NK = weights_NK * scale
        order_R, slot_NK, ends_E = sort_by_expert(experts_NK, logits_NE.shape[1])
        ctx.save_for_backward(logits_NE, experts_NK)
        ctx.settings = {"renormalise": renormalise, "sigmoid": sigmoid, "scale": scale}
        found = (weights_NK.contiguous(), experts_NK.contiguous(), order_R, slot_NK, ends_E)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_NK: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        return route_backward(dweights_NK, *ctx.saved_tensors, **ctx.settings), *[None] * 7


@op
def route(
    logits_NE: Tensor,
    count: int,
    renormalise: bool,
    *,
    sigmoid: bool = False,
    correction_E: Tensor | None = None,
    groups: int = 1,
    group_choices: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(weights_NK fp32, experts_NK, order_R, slot_NK, ends_E int32): the `count` most probable experts of each token.

    Probabilities are the softmax over all experts in fp32; of equal ones the lowest number wins. The weights are those
    of the chosen ones, divided by their sum if `renormalise`. For the others see `sort_by_expert`.

    `sigmoid`: scores are sigmoids of the logits instead, and `scale` multiplies the weights (DeepSeek-V3,
    arXiv 2412.19437). The choice is by the scores plus `correction_E`, which has no gradient and no part in the
    weights, among the experts of the `group_choices` of `groups` whose two best have the largest sums.
    """
    assert sigmoid or scale == 1
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _Route.apply(
        logits_NE, count, renormalise, sigmoid, correction_E, groups, group_choices, scale
    )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAdapter:
    """The LoRA adapters of a projection of all experts: y += scale · dropout(x) Aᵀ Bᵀ with an A and a B for each."""

    rank: int
    scale: float
    dropout: float
    salt: int
    """Separates the dropout masks of the projections of a block."""


GroupedProduct = Callable[[Tensor, Sequence[Tensor], Tensor], Sequence[Tensor]]
"""(x_RI, the weights of each projection, ends_E) → y_RO of each in x's dtype, differentiable: the product by which a
recipe replaces the plain one.
"""
Codes = tuple[Tensor, Tensor]
"""(codes E4M3 [..., K], the inverse scale of each row fp32 [...]); see `formats.fp8_rows`."""


@dataclass(frozen=True, slots=True)
class CodedProduct:
    """A `GroupedProduct` whose operands are codes of rows in both directions, so that a kernel may compute it too."""

    function: GroupedProduct
    codes: Callable[[Sequence[Tensor]], Sequence[tuple[Codes, Codes]]]
    """The weights of each projection → the codes of W [E, O, I] and of Wᵀ [E, I, O]."""

    def __call__(self, x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor) -> Sequence[Tensor]:
        """The product."""
        return self.function(x_RI, weights, ends_E)


def _rows_added(y_RO: Tensor, slot_NK: Tensor, weights_NK: Tensor | None, *, parts: bool) -> Tensor:
    """[N, O] at least fp32: the sum of each token's rows, times their weights, in the order of its choices."""
    total = None
    for k, slot_N in enumerate(slot_NK.unbind(1)):
        row_NO = wide(y_RO[(slot_N.clamp(min=0) if parts else slot_N).long()])
        row_NO = row_NO if weights_NK is None else weights_NK[:, k, None] * row_NO
        # Rows that nothing has written may be NaN, so a factor of 0 would not do.
        row_NO = torch.where((slot_N >= 0)[:, None], row_NO, 0.0) if parts else row_NO
        total = row_NO if total is None else total + row_NO
    assert total is not None
    return total


class _Gather(Function):
    """Rows of tokens in the order of their experts. The backward adds a token's rows in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, order_R: Tensor, slot_NK: Tensor, parts: bool) -> Tensor:
        ctx.save_for_backward(slot_NK)
        ctx.parts = parts
        return x_NI[(order_R // slot_NK.shape[1]).long()]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_RI: Tensor) -> tuple[Tensor | None, ...]:
        (slot_NK,) = ctx.saved_tensors
        return _rows_added(dx_RI, slot_NK, None, parts=ctx.parts).to(dx_RI.dtype), None, None, None


def gather_rows(x_NI: Tensor, order_R: Tensor, slot_NK: Tensor, *, parts: bool = False) -> Tensor:
    """[R, I]: the rows of tokens in the order of their experts; several rows may be of one choice, of which `slot_NK`
    names the one whose gradient counts. `parts`: as in `grouped_linears`.
    """
    found: Tensor = _Gather.apply(x_NI, order_R, slot_NK, parts)
    return found


@op
def grouped_linears(
    x: Tensor,
    order_R: Tensor | None,
    slot_NK: Tensor | None,
    ends_E: Tensor,
    seed: Tensor | None,
    adapters: Sequence[ExpertAdapter | None],
    product: GroupedProduct | None,
    *tensors: Tensor,
    parts: bool = False,
    others: Sequence[Tensor] = (),
) -> Sequence[Tensor]:
    """Several projections of all experts with their adapters: for each projection [R, O] in x's dtype.

    `x`: [N, I], of which each expert gets the rows of its tokens; or, without `order_R` and `slot_NK`, the sorted rows
    [R, I]. `product` multiplies with the weights (None: plainly); adapters are multiplied plainly. `tensors`: for each
    projection its weights, [E, O, I] or as `product` takes them, and, with an adapter, A [E, L, I] and B [E, O, L].
    No dropout without a seed; the mask follows the sorted rows.

    `parts`: only some choices have a row here. `slot_NK` is -1 for the others, and rows behind the last of `ends_E`
    are of any choice: they may be computed, and nobody reads them. `others`: for each projection the frozen weights of
    the last experts, where those in `tensors` are of the first alone; A and B are of all.
    """
    x_RI = x if order_R is None or slot_NK is None else gather_rows(x, order_R, slot_NK, parts=parts)
    rest = iter(tensors)
    weights, pairs = [], []
    for number, adapter in enumerate(adapters):
        weights.append(torch.cat((next(rest), others[number])) if others else next(rest))
        pairs.append(None if adapter is None else (next(rest).to(x.dtype), next(rest).to(x.dtype)))
    if product is None:
        found = [grouped_product(x_RI, weights_EOI, ends_E) for weights_EOI in weights]
    else:
        found = list(product(x_RI, weights, ends_E))
    for number, (adapter, pair) in enumerate(zip(adapters, pairs, strict=True)):
        if adapter is None or pair is None:
            continue
        dropped_RI = x_RI
        if adapter.dropout > 0 and seed is not None:
            mask = dropout_mask(x_RI.shape, seed, salt=adapter.salt, p=adapter.dropout)
            dropped_RI = x_RI * mask * (1 / (1 - adapter.dropout))
        a_ELI, b_EOL = pair
        u_RL = grouped_product(dropped_RI, a_ELI, ends_E)
        found[number] = found[number] + adapter.scale * grouped_product(u_RL, b_EOL, ends_E)
    return found


class _ExpertScale(Function):
    @staticmethod
    def forward(ctx: Any, weights_NK: Tensor, scale_E: Tensor, experts_NK: Tensor) -> Tensor:
        ctx.save_for_backward(weights_NK, scale_E, experts_NK)
        return weights_NK * scale_E[experts_NK.long()].to(weights_NK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NK: Tensor) -> tuple[Tensor | None, ...]:
        weights_NK, scale_E, experts_NK = ctx.saved_tensors
        dscale = None
        if ctx.needs_input_grad[1]:
            # A sum of fixed order: the experts of a token differ, so no two values go to one place.
            apart_NE = weights_NK.new_zeros(len(weights_NK), len(scale_E))
            dscale = apart_NE.scatter(1, experts_NK.long(), dy_NK * weights_NK).sum(0).to(scale_E.dtype)
        return dy_NK * scale_E[experts_NK.long()].to(dy_NK.dtype), dscale, None


@op
def expert_scale(weights_NK: Tensor, scale_E: Tensor, experts_NK: Tensor) -> Tensor:
    """[N, K]: the weights of each token's experts times the factors of these experts."""
    found: Tensor = _ExpertScale.apply(weights_NK, scale_E, experts_NK)
    return found


class _ExpertBias(Function):
    @staticmethod
    def forward(ctx: Any, y_RO: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
        rows_R = torch.arange(len(y_RO), device=y_RO.device, dtype=ends_E.dtype)
        expert_R = torch.searchsorted(ends_E, rows_R, right=True)
        ctx.save_for_backward(expert_R)
        ctx.bias = len(bias_EO), bias_EO.dtype
        return y_RO + bias_EO[expert_R].to(y_RO.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RO: Tensor) -> tuple[Tensor | None, ...]:
        (expert_R,) = ctx.saved_tensors
        dbias = None
        if ctx.needs_input_grad[1]:
            # A product, whose sums have a fixed order, instead of additions in the order in which threads arrive.
            count, dtype = ctx.bias
            numbers_E = torch.arange(count, device=expert_R.device)
            of_expert_ER = (numbers_E[:, None] == expert_R).to(dy_RO.dtype)
            dbias = (of_expert_ER @ dy_RO).to(dtype)
        return dy_RO, dbias, None


@op
def expert_bias(y_RO: Tensor, bias_EO: Tensor, ends_E: Tensor) -> Tensor:
    """[R, O] in y's dtype: the rows, sorted by expert, with the bias of their experts."""
    found: Tensor = _ExpertBias.apply(y_RO, bias_EO, ends_E)
    return found


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y_RO: Tensor, order_R: Tensor, slot_NK: Tensor, weights_NK: Tensor, parts: bool) -> Tensor:
        ctx.save_for_backward(y_RO, order_R, slot_NK, weights_NK)
        ctx.parts = parts
        total_NO = _rows_added(y_RO, slot_NK, weights_NK, parts=parts)
        return total_NO if parts else total_NO.to(y_RO.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NO: Tensor) -> tuple[Tensor | None, ...]:
        y_RO, order_R, slot_NK, weights_NK = ctx.saved_tensors
        dout_RO = wide(dout_NO)[(order_R // slot_NK.shape[1]).long()]
        dy_RO = weights_NK.flatten()[order_R.long()][:, None] * dout_RO
        dweights_R = (dout_RO * wide(y_RO)).sum(dim=-1)
        dweights_NK = dweights_R[(slot_NK.clamp(min=0) if ctx.parts else slot_NK).long()]
        if ctx.parts:
            dweights_NK = torch.where(slot_NK >= 0, dweights_NK, 0.0)
        return dy_RO.to(y_RO.dtype), None, None, dweights_NK.to(weights_NK.dtype), None


@op
def combine(y_RO: Tensor, order_R: Tensor, slot_NK: Tensor, weights_NK: Tensor, *, parts: bool = False) -> Tensor:
    """[N, O] in y's dtype: the sum of each token's rows times their weights, in fp32, in the order of its choices.

    Several rows may be of one choice, of which `slot_NK` names the one that counts. `parts`: as in `grouped_linears`;
    the result is that sum before it is rounded.
    """
    found: Tensor = _Combine.apply(y_RO, order_R, slot_NK, weights_NK, parts)
    return found


@op
def combined_linear(
    x_RI: Tensor,
    order_R: Tensor,
    slot_NK: Tensor,
    ends_E: Tensor,
    weights_NK: Tensor,
    seed: Tensor | None,
    adapter: ExpertAdapter | None,
    product: GroupedProduct | None,
    *tensors: Tensor,
    parts: bool = False,
    others: Sequence[Tensor] = (),
) -> Tensor:
    """[N, O]: `combine` of what `grouped_linears` gives for one projection of sorted rows.

    One op, because a kernel's backward needs none of the projected rows: the gradient of a row's weight is also the
    product of the row of x and its gradient without the weight.
    """
    (y_RO,) = grouped_linears(x_RI, None, None, ends_E, seed, [adapter], product, *tensors, others=others)
    return combine(y_RO, order_R, slot_NK, weights_NK, parts=parts)
