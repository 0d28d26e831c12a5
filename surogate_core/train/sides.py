"""The side outputs of a step as events.

Shape suffixes: L layers that have the side output, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl.sides import Role, RouterLosses
from surogate_core.engine.engine import Engine
from surogate_core.events import BlockFigures, Event, ExpertLoads, RoutingStats

DEAD_STEPS = 50
"""An expert is dead if it received no token in this many consecutive steps."""

LOAD_RECORDS = 200
"""Records of the experts' loads in a run whose `log_expert_loads` is null."""

Sides = Mapping[str, tuple[Role, Tensor]]
"""Name → (role, [L, *its shape] fp32 on the host): sums over the micro-steps of a step."""


def balance(tokens_LE: Tensor, probability_LE: Tensor, *, per_layer: bool = False) -> float:
    """The load-balancing loss of a step before its coefficient, from tokens and summed probabilities.

    As in transformers: E · Σ f P, where f and P are means over the tokens of all layers; K if loads are even. With
    `per_layer` the sum over the layers of E · Σ f P with f the share of the layer's rows; 1 a layer if loads are even.
    """
    tokens_LE, probability_LE = tokens_LE.double(), probability_LE.double()
    experts = tokens_LE.shape[1]
    if per_layer:
        f_LE = tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1)
        p_LE = probability_LE / probability_LE.sum(1, keepdim=True).clamp(min=1e-12)
        return float(experts * (f_LE * p_LE).sum())
    rows = _rows(probability_LE)
    return float(experts * (tokens_LE.sum(0) / rows * (probability_LE.sum(0) / rows)).sum())


def _rows(probability_LE: Tensor) -> Tensor:
    """The number of tokens of all layers: the probabilities of each sum to 1."""
    return probability_LE.double().sum().clamp(min=1e-12)


class SideFigures:
    """Makes events from the side outputs of each step. It is given every step once, in order."""

    def __init__(
        self,
        layers: Mapping[str, Sequence[int]],
        *,
        losses: RouterLosses | None = None,
        every: int = 0,
        moved_bytes: int = 0,
    ):
        """`layers`: name of a side output → the numbers of its layers. `every`: steps of a record of loads, or 0.
        `moved_bytes`: what a rank sends for moved experts in a step.
        """
        self._layers, self._losses, self._every = layers, losses or RouterLosses(), every
        self._moved_bytes = moved_bytes
        self._idle: list[Tensor] = []
        self._steps = 0
        self._loads: dict[str, Tensor] = {}
        self._loaded_steps = 0

    @classmethod
    def of(cls, engine: Engine, *, steps: int, every: int | None) -> SideFigures:
        """The figures of an engine in a run of `steps`; `every` as in `log_expert_loads`."""
        numbers = {piece.key: number for number, piece in enumerate(engine.plan.layers)}
        layers = {name: [numbers[piece.key] for piece in having] for name, having in engine.sides.layers.items()}
        every = max(1, math.ceil(steps / LOAD_RECORDS)) if every is None else every
        micro_steps = engine.axes.micro_batches // engine.axes.along("rows").size
        counted = engine.sides.counts_first(engine.axes.micro_batches)
        moved = engine.plan.moved_bytes(counted=counted) * micro_steps
        return cls(layers, losses=engine.sides.losses, every=every, moved_bytes=moved)

    def events(self, step: int, sides: Sides, micro_steps: int) -> Iterator[Event]:
        """The events of a step."""
        figures = {name: _mean(total, micro_steps) for name, (role, total) in sides.items() if role == "figure"}
        terms = {name: _mean(total, micro_steps) for name, (role, total) in sides.items() if role == "loss"}
        counts = {name: total for name, (role, total) in sides.items() if role == "expert_tokens"}
        if not counts:
            figures |= terms
        if figures:
            yield BlockFigures(step=step, figures=figures)
        if counts:
            yield replace(self._routing(step, counts, sides, terms), **self._of_ranks(sides, micro_steps))
            self._add_loads(counts)
            if self._every and step % self._every == 0:
                yield from self.flush(step)

    def broken_router(self, sides: Sides) -> int | None:
        """The first layer whose router has probabilities that are not finite; None if there is none."""
        return min(
            (
                number
                for name, (role, total_LE) in sides.items()
                if role == "router_probability"
                for number, row_E in zip(self._layers[name], total_LE, strict=True)
                if not bool(row_E.isfinite().all())
            ),
            default=None,
        )

    def _routing(
        self, step: int, counts: Mapping[str, Tensor], sides: Sides, terms: Mapping[str, float]
    ) -> RoutingStats:
        peaks, used, entropies, spreads = [], [], [], []
        numbers = [number for name in counts for number in self._layers[name]]
        for tokens_LE in counts.values():
            mean_L = tokens_LE.mean(1).clamp(min=1e-9)
            share_LE = tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1e-9)
            peaks += (tokens_LE.amax(1) / mean_L).tolist()
            used += (tokens_LE > 0).float().mean(1).tolist()
            entropy_L = -torch.special.xlogy(share_LE, share_LE).sum(1)
            entropies += (entropy_L / max(math.log(tokens_LE.shape[1]), 1e-9)).tolist()
            spreads += (tokens_LE.std(1, correction=0) / mean_L).tolist()
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        by_role: dict[str, list[Tensor]] = {}
        for role, total in sides.values():
            by_role.setdefault(role, []).append(total)
        probabilities = by_role.get("router_probability", [])
        aux, z = self._losses_of(by_role, terms)
        aux_in_loss, z_in_loss = (_term(by_role, role) for role in ("router_aux_loss", "router_z_loss"))
        return RoutingStats(
            step=step,
            moe_load_imbalance=sum(peaks) / len(peaks),
            moe_worst_imbalance=peaks[worst],
            moe_worst_layer=numbers[worst],
            moe_expert_utilization=sum(used) / len(used),
            moe_entropy=sum(entropies) / len(entropies),
            moe_cv=sum(spreads) / len(spreads),
            moe_top_mass=_share(by_role.get("router_mass", ()), probabilities),
            moe_dead_experts=self._dead(list(counts.values())),
            moe_aux_loss_raw=aux if aux_in_loss is None else aux_in_loss / self._losses.aux,
            moe_aux_loss=aux_in_loss,
            moe_z_loss_raw=z if z_in_loss is None else z_in_loss / self._losses.z,
            moe_z_loss=z_in_loss,
            moe_experts=max(total.shape[1] for total in counts.values()),
            moe_experts_per_token=_choices(list(counts.values()), probabilities),
        )

    def _of_ranks(self, sides: Sides, micro_batches: int) -> dict[str, Any]:
        """The fields about GPUs that even out their loads; none otherwise."""
        totals = [total_LF for role, total_LF in sides.values() if role == "rank_loads"]
        if not totals:
            return {}
        before, after, rows, _ = (torch.cat(totals).double().mean(0) / micro_batches).tolist()
        return {
            "moe_rank_imbalance": before,
            "moe_rank_imbalance_evened": after,
            "moe_moved_rows": rows,
            "moe_moved_bytes": self._moved_bytes,
        }

    def _losses_of(
        self, by_role: Mapping[str, Sequence[Tensor]], terms: Mapping[str, float]
    ) -> tuple[float | None, float | None]:
        """(auxiliary loss, z loss) of the whole step before their coefficients, as far as the blocks report what they
        need.
        """
        counts, probabilities = list(by_role["expert_tokens"]), list(by_role.get("router_probability", ()))
        aux, z = sum(terms.values()) if terms else None, None
        if probabilities and len({total.shape[1] for total in [*counts, *probabilities]}) == 1:
            tokens_LE, probability_LE = torch.cat(counts), torch.cat(probabilities)
            per_layer = self._losses.form == "layer"
            aux = balance(tokens_LE, probability_LE, per_layer=per_layer)
            if squares := by_role.get("router_z"):
                z = float(torch.cat(list(squares)).double().sum() / _rows(probability_LE))
                z *= len(tokens_LE) if per_layer else 1
        return aux, z

    def _dead(self, counts: Sequence[Tensor]) -> int | None:
        """The number of dead experts; None while fewer than `DEAD_STEPS` steps are known."""
        if not self._idle:
            self._idle = [torch.zeros_like(total) for total in counts]
        self._steps += 1
        for idle, total in zip(self._idle, counts, strict=True):
            idle.add_(1).masked_fill_(total > 0, 0)
        if self._steps < DEAD_STEPS:
            return None
        return sum(int((idle >= DEAD_STEPS).sum()) for idle in self._idle)

    def _add_loads(self, counts: Mapping[str, Tensor]) -> None:
        if not self._every:
            return
        for name, total in counts.items():
            self._loads[name] = total.double() + self._loads.get(name, 0)
        self._loaded_steps += 1

    def flush(self, step: int) -> Iterator[ExpertLoads]:
        """The record of the loads since the last one, up to `step`, if there are any; before a checkpoint, beside which
        they would be lost.
        """
        if not self._loaded_steps:
            return
        found = {
            number: tuple(int(tokens) for tokens in row)
            for name, load in self._loads.items()
            for number, row in zip(self._layers[name], load.tolist(), strict=True)
        }
        layers = tuple(sorted(found))
        yield ExpertLoads(
            step=step, steps=self._loaded_steps, layers=layers, tokens=tuple(found[layer] for layer in layers)
        )
        self._loads, self._loaded_steps = {}, 0


def _term(by_role: Mapping[str, Sequence[Tensor]], role: Role) -> float | None:
    """A term of the loss as the engine added it."""
    return next((float(total) for total in by_role.get(role, ())), None)


def _share(masses: Sequence[Tensor], probabilities: Sequence[Tensor]) -> float | None:
    """The masses of all layers for each of their tokens."""
    if not (masses and probabilities):
        return None
    return float(torch.cat(list(masses)).double().sum() / sum(_rows(total) for total in probabilities))


def _choices(counts: Sequence[Tensor], probabilities: Sequence[Tensor]) -> int | None:
    """K: rows by tokens."""
    tokens = sum(float(total.double().sum()) for total in probabilities)
    rows = sum(float(total.double().sum()) for total in counts)
    return round(rows / tokens) if math.isfinite(tokens) and tokens > 0 else None


def _mean(total: Tensor, micro_steps: int) -> float:
    return float(total.mean()) / micro_steps
