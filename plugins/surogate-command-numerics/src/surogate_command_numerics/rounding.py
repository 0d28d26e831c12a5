"""How recipes and weight formats round the operands of a model's projections, for `surogate numerics`.

Shape suffixes: N tokens, D features, I inputs, O outputs, V vocabulary, E experts, R rows sorted by expert.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from surogate_core.plugin import MicroBatch, bundles, compute, dsl, ops
from surogate_core.service.engine import Engine
from surogate_core.service.model import IDS, Multiply

ROLES: tuple[bundles.Role, ...] = get_args(bundles.Role)
DENSE, EXPERTS, QUIET = "projections", "experts", "experts with fewest tokens"
"""Parts of a layer; the last is the quarter of the experts that the batch uses least."""
CHUNK = 1 << 24
"""Elements whose errors are summed at once in fp64."""

Rounding = Callable[[Tensor, bundles.Role], tuple[Tensor, Tensor]]
"""(operand, role) → (rounded values, mask of clipped values)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """How a recipe or a weight format rounds the operands of projections and those of experts, as far as it does."""

    dense: Rounding | None = None
    experts: Rounding | None = None
    roles: tuple[bundles.Role, ...] = ROLES

    @classmethod
    def of(cls, recipe: bundles.Recipe) -> Roundings:
        """Those of a recipe."""
        return cls(dense=recipe.rounded, experts=recipe.rounded_experts)

    @classmethod
    def of_format(cls, weight_format: bundles.WeightFormat) -> Roundings:
        """Those of a weight format, which keeps weights only."""

        def kept(weight_OI: Tensor, role: bundles.Role) -> tuple[Tensor, Tensor]:
            room_OI = torch.empty_like(weight_OI)
            weight_format.unpack(weight_format.pack(weight_OI.contiguous()), room_OI)
            return room_OI, torch.zeros_like(room_OI, dtype=torch.bool)

        def each(weights_EOI: Tensor, role: bundles.Role) -> tuple[Tensor, Tensor]:
            values, clipped = zip(*(kept(weight_OI, role) for weight_OI in weights_EOI), strict=True)
            return torch.stack(values), torch.stack(clipped)

        return cls(dense=kept, experts=each, roles=("weight",))


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandRounding:
    """How a recipe or a weight format rounds the operands of one role in one part of a layer."""

    layer: int
    part: str
    role: str
    recipe: str
    """Name of the recipe or weight format."""
    error: float
    """Root of the sum of squared errors divided by the root of the sum of squares."""
    to_zero: float
    """Share of the non-zero values that become zero."""
    saturated: float
    """Share of the values that are clipped."""


class _Sums:
    """Sums over the tensors of a layer, part, role and recipe."""

    def __init__(self) -> None:
        self._totals = torch.zeros(5, dtype=torch.float64)

    def add(self, x: Tensor, rounded: Tensor, beyond: Tensor) -> None:
        for wide, near, cut in zip(*(t.reshape(-1).split(CHUNK) for t in (x, rounded, beyond)), strict=True):
            sums = (
                (near.double() - wide.double()).square().sum(),
                wide.double().square().sum(),
                ((near == 0) & (wide != 0)).sum(),
                cut.sum(),
                torch.tensor(wide.numel()),
            )
            self._totals += torch.stack([s.double().cpu() for s in sums])

    def figures(self) -> tuple[float, float, float]:
        """(relative error, share that becomes zero, share that is clipped); an error of 0 if all values are 0."""
        error, size, zeros, beyond, count = self._totals.tolist()
        return math.sqrt(error / size) if size else 0.0, zeros / count, beyond / count


class RoundingRecord:
    """What is recorded while the blocks run; `layer` is the one that runs."""

    def __init__(self, roundings: Mapping[str, Roundings]):
        self._roundings = roundings
        self.layer = 0
        self._sums: dict[tuple[int, str, str, str], _Sums] = defaultdict(_Sums)

    @torch.no_grad()
    def _dense(self, layer: int, role: bundles.Role, x: Tensor) -> None:
        for name, one in self._roundings.items():
            if one.dense is not None and role in one.roles:
                self._sums[layer, DENSE, role, name].add(x, *one.dense(x, role))

    @torch.no_grad()
    def _grouped(self, layer: int, role: bundles.Role, quiet: Tensor, x: Tensor) -> None:
        """`quiet`: which rows of x, or which of its experts, belong to the experts with fewest tokens."""
        for name, one in self._roundings.items():
            if one.experts is None or role not in one.roles or not x.numel():
                continue
            rounded, beyond = one.experts(x, role)
            self._sums[layer, EXPERTS, role, name].add(x, rounded, beyond)
            if quiet.any():
                self._sums[layer, QUIET, role, name].add(x[quiet], rounded[quiet], beyond[quiet])

    def linear(self, x_NI: Tensor, weight_OI: Tensor, slot: dsl.LinearSlot) -> Tensor:
        """The plain product of a linear slot."""
        y_NO = x_NI @ weight_OI.t()
        self._dense(self.layer, "activation", x_NI.detach())
        self._dense(self.layer, "weight", weight_OI.detach())
        y_NO.register_hook(partial(self._dense, self.layer, "gradient"))
        return y_NO

    def grouped(
        self, x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor, slots: Sequence[dsl.TracedExperts]
    ) -> list[Tensor]:
        """The plain products of experts."""
        counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
        quiet_E = torch.zeros_like(counts_E, dtype=torch.bool)
        quiet_E[torch.argsort(counts_E, stable=True)[: len(counts_E) // 4]] = True
        quiet_R = torch.repeat_interleave(quiet_E, counts_E.long())
        self._grouped(self.layer, "activation", quiet_R, x_RI.detach())
        found = []
        for weights_EOI in weights:
            self._grouped(self.layer, "weight", quiet_E, weights_EOI.detach())
            found.append(compute.grouped_product(x_RI, weights_EOI, ends_E))
            found[-1].register_hook(partial(self._grouped, self.layer, "gradient", quiet_R))
        return found

    def results(self) -> Iterator[OperandRounding]:
        """By layer, part, role and recipe."""
        for key in product(range(self.layer), (DENSE, EXPERTS, QUIET), ROLES, self._roundings):
            if (sums := self._sums.get(key)) is not None:
                layer, part, role, name = key
                error, zeros, cut = sums.figures()
                yield OperandRounding(
                    layer=layer, part=part, role=role, recipe=name, error=error, to_zero=zeros, saturated=cut
                )


def rounding_of(engine: Engine, batch: MicroBatch, roundings: Mapping[str, Roundings]) -> list[OperandRounding]:
    """How each rounds the operands of the engine's projections, by layer, part and role, on one micro-batch.

    The blocks are run eagerly and multiply plainly, so operands are those of a model without rounding.
    """
    record = RoundingRecord(roundings)
    engine.inputs.load(batch, engine.seeds(0, 0), 1.0)
    tables = {
        **engine.inputs.tables(engine.model, engine.settings.dtype),
        "cu_seqlens": engine.inputs.cu_seqlens,
        IDS: engine.inputs.input_ids,
    }
    relayed: dict[tuple[int, str], torch.Tensor] = {}
    (embedding,) = engine.parameters.inputs(engine.plan.embed)
    with torch.enable_grad():
        x_ND = engine.model.embedded(engine.inputs.input_ids, embedding).detach().requires_grad_()
        for piece in engine.plan.layers:
            assert piece.block is not None
            tensors = {s.name: t for s, t in zip(piece.specs, engine.parameters.inputs(piece), strict=True)}
            if engine.parameters.shared:
                # The next layer is unpacked into the same workspace, and the backward reads both.
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            bound = piece.block.bind(
                tensors, piece.slots, Multiply(record.linear, record.grouped), experts=piece.experts
            )
            bound.taken = piece.taken(relayed)
            x_ND, _ = bound.outputs(x_ND, tables)
            piece.keep(relayed, [bound.given[spec.name] for spec in piece.gives])
            record.layer += 1
        head = engine.plan.head
        tensors = {s.name: t for s, t in zip(head.specs, engine.parameters.inputs(head), strict=True)}
        logits_NV = engine.model.logits(x_ND, tensors)
        loss = ops.cross_entropy(logits_NV, engine.inputs.labels).sum() / max(1, batch.label_tokens)
        loss.backward()
    return list(record.results())
