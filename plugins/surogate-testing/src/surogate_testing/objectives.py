"""Checks of objectives: one loss per token, its gradient, chunks, training.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import torch
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, bundles
from surogate_testing import tiny
from surogate_testing.check import ensure


def _case(objective: bundles.Objective, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(logits, labels, the columns that it declares) of 12 tokens."""
    generator = torch.Generator().manual_seed(0)
    labels_N = torch.randint(0, 32, (12,), generator=generator)
    labels_N[::3] = IGNORE_LABEL
    logits_NV = torch.randn(12, 32, generator=generator).to(dtype)
    return logits_NV, labels_N, {name: torch.rand(12, generator=generator) + 0.5 for name in objective.columns}


def gives_a_loss_for_each_token(objective: bundles.Objective) -> None:
    """[N, V] and [N] to [N] fp32, finite, and 0 where the label is -100."""
    for dtype in (torch.float32, torch.bfloat16):
        logits_NV, labels_N, columns = _case(objective, dtype)
        loss_N = objective.token_loss(logits_NV, labels_N, columns)
        ensure(loss_N.shape == labels_N.shape, f"the loss in {dtype} has the shape {tuple(loss_N.shape)}, not [N]")
        ensure(loss_N.dtype == torch.float32, f"the loss in {dtype} is {loss_N.dtype}, not torch.float32")
        ensure(bool(loss_N.isfinite().all()), f"the loss in {dtype} is not finite")
        ensure(not loss_N[labels_N == IGNORE_LABEL].any(), f"the loss in {dtype} is not 0 where the label is -100")


def is_differentiable(objective: bundles.Objective) -> None:
    """The gradient of the summed loss is finite, 0 where the label is -100, and not 0 elsewhere."""
    for dtype in (torch.float32, torch.bfloat16):
        logits_NV, labels_N, columns = _case(objective, dtype)
        leaf = logits_NV.requires_grad_()
        (gradient,) = torch.autograd.grad(objective.token_loss(leaf, labels_N, columns).sum(), [leaf])
        ignored_N = labels_N == IGNORE_LABEL
        ensure(bool(gradient.isfinite().all()), f"the gradient in {dtype} is not finite")
        ensure(not gradient[ignored_N].any(), f"the gradient in {dtype} is not 0 where the label is -100")
        ensure(bool(gradient[~ignored_N].any(1).all()), f"the gradient in {dtype} of a trained token is 0")


def does_not_look_at_other_tokens(objective: bundles.Objective) -> None:
    """The engine calls it once for each chunk of tokens, so a token's loss is the same in any chunk."""
    logits_NV, labels_N, columns = _case(objective, torch.float32)
    whole_N = objective.token_loss(logits_NV, labels_N, columns)
    for chunk in (slice(0, 5), slice(5, 12)):
        part = {name: column[chunk] for name, column in columns.items()}
        part_N = objective.token_loss(logits_NV[chunk], labels_N[chunk], part)
        error = tiny.relative_error(part_N, whole_N[chunk])
        ensure(error <= 1e-6, f"tokens {chunk.start} to {chunk.stop} alone: relative error {error:.1e}")


def has_a_differentiable_loss_of_sequences(objective: bundles.Objective) -> None:
    """`sequence_loss`, where there is one: 0-d, finite, and its gradient reaches trained tokens only."""
    if objective.sequence_loss is None:
        return
    logits_NV, labels_N, columns = _case(objective, torch.float32)
    positions_N = torch.arange(6, dtype=torch.int32).repeat(2)
    leaf_N = objective.token_loss(logits_NV, labels_N, columns).detach().requires_grad_()
    loss = objective.sequence_loss(leaf_N, positions_N, columns)
    ensure(
        loss.shape == () and loss.dtype == torch.float32, f"the loss is {loss.dtype} of {tuple(loss.shape)}, not 0-d"
    )
    (gradient_N,) = torch.autograd.grad(loss, [leaf_N])
    ensure(bool(loss.isfinite()) and bool(gradient_N.isfinite().all()), "the loss or its gradient is not finite")
    ensure(bool(gradient_N[labels_N != IGNORE_LABEL].any()), "no trained token has a gradient")


def reports_its_figures(objective: bundles.Objective) -> None:
    """Each of `figures`, where there are any: finite, one value a token or 0-d, and a count that is not negative."""
    logits_NV, labels_N, columns = _case(objective, torch.float32)
    positions_N = torch.arange(6, dtype=torch.int32).repeat(2)
    with torch.no_grad():
        loss_N = objective.token_loss(logits_NV, labels_N, columns)
        of_tokens = objective.token_figures(logits_NV, labels_N, columns) if objective.token_figures else ()
        sums = objective.sequence_figures(loss_N, positions_N, columns) if objective.sequence_figures else ()
    names = objective.figures
    ensure(len(of_tokens) + len(sums) == len(names), f"{len(of_tokens) + len(sums)} figures for the names {names}")
    for name, value in zip(names, [*of_tokens, *sums], strict=True):
        shape = labels_N.shape if name in names[: objective.of_tokens] else torch.Size()
        ensure(value.shape == shape, f"{name} has shape {tuple(value.shape)}, not {tuple(shape)}")
        values = value[labels_N != IGNORE_LABEL] if value.dim() else value
        ensure(bool(values.isfinite().all()), f"{name} is not finite")
    ensure(not sums or float(sums[0]) >= 0, "the count of the sequence figures is negative")


def trains(objective: bundles.Objective) -> None:
    """It is traced with the head, whole and in chunks, and on a tiny model the loss falls."""
    batch = tiny.batches(0)[0]
    columns = {name: torch.full((tiny.TOKENS,), 1.0) for name in objective.columns}
    batches = [replace(batch, columns=columns)]
    for chunks in (1, 4):
        made = tiny.engine(objective=objective, head_chunks=chunks, columns=objective.columns)
        losses = [made.train_step(batches, step=step, lr=0.1).read()[0] for step in range(5)]
        ensure(all(map(math.isfinite, losses)), f"a loss is not finite: {losses}")
        ensure(losses[-1] < losses[0], f"the loss does not fall: {losses}")


def is_built_from_its_options(spec: bundles.ObjectiveSpec) -> None:
    """The objective has the spec's name, and the same loss to the bit when it is built again: resumed runs do so."""
    first, second = spec.build(spec.options()), spec.build(spec.options())
    ensure(first.name == spec.name, f"the objective that it builds is named {first.name}, not {spec.name}")
    ensure((first.columns, first.figures) == (second.columns, second.figures), "built again it has other columns")
    logits_NV, labels_N, columns = _case(first, torch.float32)
    one_N, other_N = (made.token_loss(logits_NV, labels_N, columns) for made in (first, second))
    ensure(torch.equal(one_N, other_N), "built again it gives another loss")


def _of_default_options(check: Callable[[bundles.Objective], None]) -> Callable[[bundles.ObjectiveSpec], None]:
    @wraps(check)
    def of_spec(spec: bundles.ObjectiveSpec) -> None:
        check(spec.build(spec.options()))

    return of_spec


OF_OBJECTIVES = (
    gives_a_loss_for_each_token,
    is_differentiable,
    does_not_look_at_other_tokens,
    has_a_differentiable_loss_of_sequences,
    reports_its_figures,
    trains,
)
"""Checks of any objective, also of one that a task has."""
CHECKS = (is_built_from_its_options, *map(_of_default_options, OF_OBJECTIVES))
"""Checks of what the hook offers."""
