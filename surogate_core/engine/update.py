"""The optimizer step: norm, clipping, the update of the masters, the recipe's state, the compute copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surogate_core.bundles import Optimizer
from surogate_core.dsl.sides import Role
from surogate_core.engine.figures import FigureSums
from surogate_core.engine.gradient_norm import ExpertNorm, FlatNorm, SegmentNorm, StreamedNorm
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.placement import Placement
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.ranks.sharding import Sharing, owners, piece_ranges
from surogate_core.engine.ranks.traffic import Traffic
from surogate_core.engine.step import StepContext
from surogate_core.kernels.optimizing.cpu_updates import host_kernels
from surogate_core.kernels.registry import using
from surogate_core.mesh.sums import LANES


@dataclass(slots=True)
class StepResult:
    """The figures of an optimizer step; reading them waits for the device if it is behind."""

    label_tokens: int
    loss_weight: float
    tokens: int
    micro_steps: int
    _figures: Tensor
    _ready: torch.cuda.Event | None
    _own: FigureSums
    """Names the objective's figures."""
    _sides: Mapping[str, tuple[Role, torch.Size]]
    """Name of a side output → its role and [layers, *its shape], in the order of the figures."""

    def sides(self) -> dict[str, tuple[Role, Tensor]]:
        """Name of a side output → (role, [layers that have it, *its shape] fp32 on the host): sums over micro-steps."""
        self._wait()
        at, found = self._figures.numel() - sum(shape.numel() for _, shape in self._sides.values()), {}
        for name, (role, shape) in self._sides.items():
            found[name] = (role, self._figures[at : at + shape.numel()].view(shape))
            at += shape.numel()
        return found

    def _wait(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()

    def read(self) -> tuple[float, float]:
        """(mean loss per label token, each by its weight; gradient norm before clipping)."""
        self._wait()
        loss_sum, norm = self._figures[:2].tolist()
        return loss_sum / (self.loss_weight or 1), norm

    def figures(self) -> dict[str, float]:
        """The objective's figures by name."""
        if not self._own.names:
            return {}
        self._wait()
        values = self._figures[2 : 2 + len(self._own.names)].tolist()
        return self._own.named(values, label_tokens=self.label_tokens)

    def used_range(self, columns: int) -> Tensor:
        """[P, K] fp32 on the host, of a recipe whose state has `formats` of K `columns`."""
        self._wait()
        sides = sum(shape.numel() for _, shape in self._sides.values())
        first = 2 + len(self._own.names)
        return self._figures[first : self._figures.numel() - sides].view(-1, columns)


def norm_of(
    parameters: Parameters, assembly: Assembly, *, sharing: Sharing, traffic: Traffic, streams_gradients: bool
) -> FlatNorm:
    """Computes the norm of all gradients, in the place with the fastest access to them."""
    settings, axes = assembly.settings, sharing.axes
    groups = parameters.host_groups if settings.update_on_cpu else parameters.groups
    own = {group.name for group in parameters.flat.of_experts}
    experts, others = ([g for g in groups if (g.name in own) is ours] for ours in (True, False))
    by_segments = axes.shards or (axes.exact and axes.zero_level > 0)
    if experts:
        rest = _segment_norm(parameters, sharing, traffic) if by_segments else FlatNorm(others)
        return ExpertNorm(rest if others else None, experts, sharing.along["expert"])
    if by_segments:
        return _segment_norm(parameters, sharing, traffic)
    if settings.update_on_cpu and settings.device.type == "cuda" and streams_gradients and axes.ranks == 1:
        trained = [spec.hf_name for spec in parameters.specs.values() if spec.trainable]
        return StreamedNorm(parameters.pieces, trained, settings.device)
    return FlatNorm(groups)


def _segment_norm(parameters: Parameters, sharing: Sharing, traffic: Traffic) -> FlatNorm:
    """The norm by the segments that do not depend on the number of ranks; of other numbers, by their parts."""
    stages, sharded = sharing.stages, parameters.sharded
    parts, experts = stages.parts, {group.name for group in parameters.flat.of_experts}
    groups = [group for group in parameters.groups if group.name not in experts]
    cuts = LANES if LANES % parts == 0 else parts
    found: list[tuple[int, Tensor]] = []
    if sharded is not None:
        whole = [g for g in groups if not any(g is other for other in sharded.groups)]
        spans = {key: (part.owners[0][0], part.owners[-1][1]) for key, part in sharded.parts.items()}
    else:
        decayed = next(g for g in parameters.groups if g.name == "decayed")
        whole = [g for g in groups if g is not decayed]
        spans = piece_ranges(parameters.pieces, decayed.shapes)
    for number, (key, span) in enumerate(spans.items()):
        for cut, (a, b) in enumerate(owners(span, cuts)):
            # One replica gives the sums of its parts to all.
            if a == b or cut * parts // cuts != stages.own or stages.replica:
                continue
            if sharded is None:
                part = decayed.grad[a:b]
            else:
                start = sharded.parts[key].own[0]
                part = sharded.own_sums(key)[a - start : b - start]
            found.append((number * cuts + cut, part))
    return SegmentNorm(found, len(spans) * cuts, whole, traffic.add)


class Update:
    """The whole optimizer step, on the device or on the CPU."""

    def __init__(self, context: StepContext, placement: Placement, *, rounding_seed: Tensor, cleared: Sequence[Tensor]):
        """`cleared`: the gradient sums that the update sets to zero; their store clears the others."""
        assembly, parameters, figures = context.plan.assembly, context.parameters, context.figures
        self._traffic, self._norm, self._losses, self.rows = context.traffic, context.norm, context.losses, context.rows
        self._settings, self._parameters, self._cleared = assembly.settings, parameters, cleared
        self._own, self._sides, self._rounding_seed = figures, context.sides, rounding_seed
        self._side_shapes, rows, settings = self._sides.shapes(), self.rows, self._settings
        self._groups = parameters.host_groups if settings.update_on_cpu else parameters.groups
        with placement.allocating("optimizer"):
            self.optimizer: Optimizer = assembly.optimizer.build(self._groups, assembly.optimizer_options)
        on_cpu = settings.update_on_cpu
        self._kernels = host_kernels(compiled=settings.compiler == "inductor") if on_cpu else assembly.kernels
        self._lr = torch.zeros((), dtype=torch.float32, device="cpu" if on_cpu else settings.device)
        ranges = rows.state.rows.numel() if rows is not None and rows.state.formats else 0
        self._ranges = ranges
        self._first = 2 + len(figures.names)
        size = self._first + ranges + sum(shape.numel() for _, shape in self._side_shapes.values())
        self._figures = torch.zeros(size, dtype=torch.float32, device=settings.device)

    def set(self, *, lr: float, step: int) -> None:
        """Set the learning rate of the next update and, from the step's number, its rounding seed."""
        self._lr.fill_(lr)
        self._rounding_seed.fill_(self.rounding_seed(step))

    def rounding_seed(self, step: int) -> int:
        """Seed of the stochastic rounding of a step's masters, an int32; a resumed run computes it from the step."""
        sequence = np.random.SeedSequence([self._settings.seed, step], spawn_key=(1,))
        return int(sequence.generate_state(1, np.uint32).view(np.int32)[0])

    def run(self) -> None:
        """Clip, step, refresh the compute copies, clear the gradients. The host waits only if it runs the step
        itself.
        """
        settings, on_host = self._settings, self._settings.update_on_cpu
        self._traffic.reduce_rest()
        if on_host and settings.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        norm = self._norm.read().to(self._lr.device)
        clip = torch.ones_like(norm)
        if settings.max_grad_norm > 0:
            clip = (settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        skip = (~torch.isfinite(norm)).float()
        with using(self._kernels):
            self.optimizer.step(lr=self._lr, clip=clip, skip=skip)
        self._figures[:2].copy_(torch.stack((self.take_loss().float(), norm.to(settings.device))))
        if self._own.names:
            self._figures[2 : self._first].copy_(self._own.take(self._traffic))
        if self.rows is not None:
            self._traffic.largest(self.rows.observed)
            if self._ranges:
                self._figures[self._first : self._first + self._ranges].copy_(
                    self.rows.state.used_range(self.rows.observed).view(-1)
                )
            self.rows.state.update(self.rows.observed, skip.to(settings.device))
            self.rows.observed.zero_()
        if self._sides.sums:
            self._figures[self._first + self._ranges :].copy_(self._sides.take(self._traffic))
        self._parameters.refresh(on_host=on_host)
        for sums in self._cleared:
            sums.zero_()

    def take_loss(self) -> Tensor:
        """0-d float64: the sum of the step's losses over all ranks; resets it."""
        by_number, total = self._losses.by_number, self._losses.take()
        if by_number is not None:
            self._traffic.add(by_number)
            # The rest is of micro-batches without a number, which only one rank has.
            total = total + by_number.sum()
            by_number.zero_()
        return total

    def spoil(self) -> None:
        """Make the gradients of the next update NaN, so that it changes nothing."""
        for group in self._parameters.groups:
            # One value of a parameter is enough. It must not be in the padding, which is never written again.
            group.grad[:1].fill_(float("nan"))
        self._norm.spoil()

    def result(self, *, label_tokens: int, loss_weight: float, tokens: int, micro_steps: int) -> StepResult:
        """The figures of the last update, being copied to the host."""
        ready = None
        if self._settings.device.type != "cuda":
            figures = self._figures.clone()
        else:
            figures = torch.empty(self._figures.shape, dtype=torch.float32, pin_memory=True)
            figures.copy_(self._figures, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return StepResult(label_tokens, loss_weight, tokens, micro_steps, figures, ready, self._own, self._side_shapes)
