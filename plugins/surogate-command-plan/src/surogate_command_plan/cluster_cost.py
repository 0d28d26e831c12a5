"""The cost of a cluster that is not here, for `surogate plan num_nodes=M gpus_per_node=N`, and how it is shown.

What goes over which wire, how long it takes, and what of it computation hides. docs/thousand-gpus.md of this
distribution has the formulas. A cluster has N ranks, M nodes and g GPUs in each; S is the bytes of a whole tensor.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from surogate_command_plan.cluster import HOW_TO_MEASURE, HOW_TO_TIME, Cluster
from surogate_command_plan.speed import CALL, HIDDEN, HIDDEN_NCCL, Wire, wire_of
from surogate_core.plugin import atomic
from surogate_core.service.config import numbers

if TYPE_CHECKING:
    from surogate_core.service.engine import Sent

BASE = 8.4e-6
"""Seconds of a collective before its first step: NCCL's cost model (src/graph/tuning.cc, ring, protocol Simple)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireTraffic:
    """What transfers put on the wires in an optimizer step."""

    inside: float
    """Bytes that each GPU sends to others of its node."""
    between: float
    """Bytes that each node sends to other nodes."""
    seconds: float
    """Time with nothing beside it; 0 if the wires are not known."""
    copied: float
    """Part of it in which the data stays inside a node, where copy engines can move it."""


Model = Callable[[Cluster, "Sent"], WireTraffic]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spread:
    """The ranks among which a tensor is sent, and where they are."""

    members: int
    here: int
    """Members on each of their nodes."""
    whole: float
    """S: bytes of the tensors of which every member sends all but its own part."""

    @classmethod
    def of(cls, cluster: Cluster, sent: Sent) -> _Spread:
        """Members are neighbours, or at equal distances."""
        members = sent.ranks or cluster.ranks
        near = math.gcd(members * sent.stride, cluster.per_node)
        return cls(
            members=members,
            here=max(near // sent.stride, 1),
            whole=sent.nbytes * members / (members - 1),
        )

    @property
    def nodes(self) -> int:
        """Nodes of the members."""
        return self.members // self.here


def flat(cluster: Cluster, sent: Sent) -> WireTraffic:
    """To all ranks alike, wherever they are.

    An exchange is all-to-all, and both wires work at the same time. A gather is a ring through all members, which
    enters and leaves each node once (NCCL's all-gather).
    """
    of, group = _Spread.of(cluster, sent), cluster.per_node
    if sent.how == "exchange":
        inside = of.whole * (of.here - 1) / of.members
        between = group * of.whole * (of.members - of.here) / of.members
        each = _latency(cluster, inner=0, outer=min(of.nodes - 1, 1))
    else:
        inside = float(sent.nbytes) if of.nodes == 1 else sent.nbytes * (of.here - 1) / of.here
        between = float(group // of.here * sent.nbytes) if of.nodes > 1 else 0.0
        each = _latency(cluster, inner=of.members - of.nodes, outer=of.nodes - 1)
    inner, outer = _seconds(cluster, sent, inside, between)
    seconds = max(inner, outer) + sent.calls * each if cluster.timed else 0.0
    return WireTraffic(inside=inside, between=between, seconds=seconds, copied=seconds if of.nodes == 1 else 0.0)


def hierarchical(cluster: Cluster, sent: Sent) -> WireTraffic:
    """In two stages: inside each node, and between the members of the same number of each node. Each byte leaves a node
    once. A gather has the stages in the other order, and each of them is a ring.
    """
    of = _Spread.of(cluster, sent)
    inside = of.whole * (of.here - 1) / of.here
    between = cluster.per_node * of.whole / of.here * (of.nodes - 1) / of.nodes
    ring, latency = sent.how == "gather", 0.0
    if of.here > 1:
        latency += _latency(cluster, inner=of.here - 1 if ring else 0, outer=0)
    if of.nodes > 1:
        latency += _latency(cluster, inner=0, outer=of.nodes - 1 if ring else 1)
    inner, outer = _seconds(cluster, sent, inside, between)
    seconds = inner + outer + sent.calls * latency if cluster.timed else 0.0
    return WireTraffic(inside=inside, between=between, seconds=seconds, copied=seconds if of.nodes == 1 else inner)


def _latency(cluster: Cluster, *, inner: int, outer: int) -> float:
    """Seconds of a call that moves nothing: at least what a small collective takes as measured."""
    steps = inner * (0.0 if cluster.inside is None else cluster.inside.step)
    steps += outer * (0.0 if cluster.between is None else cluster.between.step)
    return max(CALL, BASE + steps)


def _seconds(cluster: Cluster, sent: Sent, inside: float, between: float) -> tuple[float, float]:
    """Seconds of the bytes on each wire."""
    inner = 0.0 if cluster.inside is None else inside / cluster.inside.bandwidth(sent.how)
    outer = 0.0 if cluster.between is None else between / cluster.between.bandwidth(sent.how)
    return inner, outer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """Times of transfers by a model."""

    cluster: Cluster
    model: Model

    def seconds(self, sent: Sent) -> float:
        """Time of all calls of a step, with nothing beside them."""
        return self.model(self.cluster, sent).seconds

    def hidden(self, sent: Sent) -> float:
        """Share of it that computation beside it hides at most."""
        of = self.model(self.cluster, sent)
        copied = of.copied / of.seconds if self.cluster.copies and of.seconds else 0.0
        return HIDDEN_NCCL + (HIDDEN - HIDDEN_NCCL) * copied


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """What one GPU of the cluster computes in an optimizer step."""

    tokens: int
    """Its tokens."""
    micro_steps: int
    update: float
    """Seconds of the optimizer's update of all weights on one GPU; 0 if they are not known."""
    shared: float
    """Share of the update that other GPUs do."""

    def alone(self, cluster: Cluster) -> float:
        """Seconds of the step on one GPU alone, from the measured speed."""
        assert cluster.tokens_per_second is not None
        return self.tokens / cluster.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """An optimizer step of the cluster by one model."""

    each: tuple[WireTraffic, ...]
    """For each kind of tensor that is sent."""
    wire: Wire | None
    """None if the wires are not known."""
    seconds: float | None
    """The time of a step; None if the speed of one GPU or a wire is not known."""
    alone: float | None
    """The time of a step of one GPU alone with as many tokens as each has."""

    @property
    def inside(self) -> float:
        """Bytes that each GPU sends to others of its node."""
        return sum(one.inside for one in self.each)

    @property
    def between(self) -> float:
        """Bytes that each node sends to other nodes."""
        return sum(one.between for one in self.each)

    @property
    def efficiency(self) -> float | None:
        """Tokens per second as a share of those of as many single GPUs; None if the time is not known."""
        return None if self.seconds is None or self.alone is None else self.alone / self.seconds


def cost(cluster: Cluster, sent: Sequence[Sent], work: GpuWork, model: Model = flat) -> Cost:
    """An optimizer step in which each rank sends `sent`.

    What leaves a node is moved by NCCL, whose kernels slow the computation beside them, so that it hides less.
    """
    each = tuple(model(cluster, one) for one in sent)
    if not cluster.timed:
        return Cost(each=each, wire=None, seconds=None, alone=None)
    alone = None if cluster.tokens_per_second is None else work.alone(cluster)
    computing = 0.0 if alone is None else max(alone - work.update, 0.0)
    wire = wire_of(
        sent,
        _Timed(cluster=cluster, model=model),
        computing=computing / work.micro_steps,
        micro_steps=work.micro_steps,
    )
    seconds = None if alone is None else alone - work.shared * min(work.update, alone) + wire.exposed
    return Cost(each=each, wire=wire, seconds=seconds, alone=alone)


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
        cells = [atomic.human_bytes(round(cost.inside))]
        cells += [atomic.human_bytes(round(cost.between))] * (cluster.nodes > 1)
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


def _cells(cluster: Cluster, one: WireTraffic) -> list[str]:
    between = [atomic.human_bytes(round(one.between))] * (cluster.nodes > 1)
    return [atomic.human_bytes(round(one.inside)), *between, _time(one.seconds) if cluster.timed else "?"]


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
            "no run on several machines has been measured: "
            "thousand-gpus.md of surogate-command-plan says what is assumed"
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
