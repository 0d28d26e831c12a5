"""The side outputs of a step as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from surogate_core.dsl.sides import Role
from surogate_core.events import BlockFigures, Event, RoutingStats


def side_events(step: int, sides: Mapping[str, tuple[Role, Tensor]], micro_steps: int) -> Iterator[Event]:
    """What is said of a step's side outputs. `sides`: name → (role, [layers, *its shape], summed over micro-steps)."""
    figures = {name: float(total.mean()) / micro_steps for name, (role, total) in sides.items() if role == "figure"}
    if figures:
        yield BlockFigures(step=step, figures=figures)
    counts = [total for role, total in sides.values() if role == "expert_tokens"]
    terms = [total for role, total in sides.values() if role == "loss"]
    if counts:
        loads = [layer / layer.mean().clamp(min=1e-9) for total in counts for layer in total]
        used = [float((load > 0).float().mean()) for load in loads]
        yield RoutingStats(
            step=step,
            imbalance=max(float(load.max()) for load in loads),
            utilization=sum(used) / len(used),
            aux_loss=sum(float(t.mean()) / micro_steps for t in terms) if terms else None,
        )
    elif terms:
        losses = {name: float(t.mean()) / micro_steps for name, (role, t) in sides.items() if role == "loss"}
        yield BlockFigures(step=step, figures=losses)
