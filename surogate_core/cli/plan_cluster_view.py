"""How `surogate plan num_nodes=M gpus_per_node=N` shows a cluster."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from surogate_core import numbers
from surogate_core.cli.cluster import HOW_TO_MEASURE, HOW_TO_TIME, Cluster
from surogate_core.cli.plan_cluster import Cost, Traffic
from surogate_core.engine.ranks.shares import Sent
from surogate_core.files.atomic import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Everything that is said about a cluster."""

    cluster: Cluster
    sent: Sequence[Sent]
    flat: Cost
    """With sums in one stage, which treats all GPUs alike."""
    hierarchical: Cost
    """With sums in two stages: inside each node, and between nodes."""
    staged: bool
    """Whether the run has two stages."""
    tokens: int
    """Tokens of an optimizer step of all GPUs."""
    update_known: bool
    """Whether the time of the optimizer's update is known, which the GPUs share at `zero_level` 1 to 3."""

    @property
    def cost(self) -> Cost:
        """What the run sends."""
        return self.hierarchical if self.staged else self.flat

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a step over its time; None if it is not known."""
        return None if self.cost.seconds is None else self.tokens / self.cost.seconds


def speed(plan: ClusterPlan) -> str:
    """The speed, and what is missing where it is not known."""
    cluster, rate, seconds, share = plan.cluster, plan.tokens_per_second, plan.cost.seconds, plan.cost.efficiency
    if rate is None or seconds is None or share is None:
        missing = [HOW_TO_TIME] * (not cluster.timed) + [HOW_TO_MEASURE] * (cluster.tokens_per_second is None)
        return f"not known; {'; '.join(missing)}"
    return (
        f"{numbers.rate(rate)} tokens/s, {numbers.significant(seconds)} s a step, {min(share, 1):.0%} of the speed of "
        f"{cluster.ranks:,} single GPUs (from the given {cluster.tokens_per_second:,.0f} tokens/s of one)"
    )


def as_text(plan: ClusterPlan) -> str:
    """What goes over the wires, and what of it computation hides."""
    cluster = plan.cluster
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensors")
    table.add_column("calls", justify="right")
    table.add_column("inside a node,\neach GPU sends", justify="right")
    if cluster.nodes > 1:
        table.add_column("between nodes,\neach node sends", justify="right")
    table.add_column("time", justify="right")
    table.add_column("beside")
    for sent, one in zip(plan.sent, plan.cost.each, strict=True):
        beside = f"the {sent.beside}" if sent.beside in ("forward", "backward") else "both" if sent.beside else ""
        table.add_row(sent.what, f"{sent.calls:,}", *_cells(cluster, one), beside)
    buffer = io.StringIO()
    Console(file=buffer, width=130, highlight=False).print(table)
    return f"Wires, for an optimizer step{_wires(cluster)}\n{buffer.getvalue()}\n{_totals(plan)}"


def _totals(plan: ClusterPlan) -> str:
    """The step as the run sends, and with sums in the other number of stages."""
    cluster = plan.cluster
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("in all")
    costs = {"as this run sends": plan.cost}
    if cluster.nodes > 1 and cluster.per_node > 1:
        other, cost = ("one stage", plan.flat) if plan.staged else ("two stages", plan.hierarchical)
        costs[f"in {other}, with hierarchical_reduction={str(not plan.staged).lower()}"] = cost
    heads = ["inside"] + ["between"] * (cluster.nodes > 1) + ["time"] * cluster.timed
    heads += ["of it hidden", "a step", "efficiency"] * (plan.cost.seconds is not None)
    for head in heads:
        table.add_column(head, justify="right")
    for name, cost in costs.items():
        cells = [human_bytes(round(cost.inside))]
        cells += [human_bytes(round(cost.between))] * (cluster.nodes > 1)
        cells += [] if cost.wire is None else [_time(cost.wire.seconds)]
        if cost.wire is not None and cost.seconds is not None and cost.efficiency is not None:
            cells += [_time(cost.wire.hidden), _time(cost.seconds), f"{min(cost.efficiency, 1):.0%}"]
        table.add_row(name, *cells)
    buffer = io.StringIO()
    Console(file=buffer, width=130, highlight=False).print(table)
    return buffer.getvalue()


def _time(seconds: float) -> str:
    return f"{numbers.significant(seconds)} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _wires(cluster: Cluster) -> str:
    if cluster.inside is None:
        return ""
    return f": {cluster.inside} inside" + (f", {cluster.between} between nodes" if cluster.between is not None else "")


def _cells(cluster: Cluster, one: Traffic) -> list[str]:
    between = [human_bytes(round(one.between))] * (cluster.nodes > 1)
    return [human_bytes(round(one.inside)), *between, _time(one.seconds) if cluster.timed else "?"]


def notes(plan: ClusterPlan) -> list[str]:
    """What the figures rest on."""
    cluster, found = plan.cluster, []
    for link in (cluster.inside, cluster.between):
        if link is not None:
            both = {link.exchange, link.gather}
            shares = " to ".join(f"{share:.0%}" for share in sorted(both))
            found.append(f"{link.title}: {shares} of {link.rate / 1e9:g} GB/s are reached, {link.shares}")
    if cluster.nodes > 1:
        found.append(
            "no run on several machines has been measured: docs/explanation/thousand-gpus.md says what is assumed"
        )
    if cluster.tokens_per_second is not None and not plan.update_known:
        found.append("the time that GPUs save by sharing the optimizer's update is not counted; --gpu would tell it")
    return found


def as_json(plan: ClusterPlan) -> dict[str, Any]:
    """Keys of the plan in JSON; some replace those of one machine."""
    return {
        "tokens_per_second": plan.tokens_per_second,
        "seconds_per_step": plan.cost.seconds,
        "efficiency": plan.cost.efficiency,
        "sent_seconds": None if plan.cost.wire is None else plan.cost.wire.seconds,
        "hidden_seconds": _hidden(plan.cost),
        "cluster": {
            "num_nodes": plan.cluster.nodes,
            "gpus_per_node": plan.cluster.per_node,
            "inside": None if plan.cluster.inside is None else str(plan.cluster.inside),
            "between": None if plan.cluster.between is None else str(plan.cluster.between),
            "given_tokens_per_second": plan.cluster.tokens_per_second,
            "stages": 2 if plan.staged else 1,
            "flat": _cost(plan.flat),
            "hierarchical": _cost(plan.hierarchical),
        },
    }


def _hidden(cost: Cost) -> float | None:
    return None if cost.wire is None or cost.seconds is None else cost.wire.hidden


def _cost(cost: Cost) -> dict[str, Any]:
    return {
        "inside_bytes": round(cost.inside),
        "between_bytes": round(cost.between),
        "seconds": None if cost.wire is None else cost.wire.seconds,
        "hidden_seconds": _hidden(cost),
        "step_seconds": cost.seconds,
        "efficiency": cost.efficiency,
    }
