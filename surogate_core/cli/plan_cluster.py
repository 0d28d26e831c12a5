"""The cost of a cluster that is not here, for `surogate plan num_nodes=M gpus_per_node=N`.

What goes over which wire, how long it takes, and what of it computation hides. docs/explanation/thousand-gpus.md has
the formulas. A cluster has N ranks, M nodes and g GPUs in each; S is the bytes of a whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.cli.cluster import Cluster
from surogate_core.cli.plan_wire import CALL, HIDDEN, HIDDEN_NCCL, Wire, wire_of

if TYPE_CHECKING:
    from surogate_core.engine.ranks.shares import Sent

BASE = 8.4e-6
"""Seconds of a collective before its first step: NCCL's cost model (src/graph/tuning.cc, ring, protocol Simple)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What transfers put on the wires in an optimizer step."""

    inside: float
    """Bytes that each GPU sends to others of its node."""
    between: float
    """Bytes that each node sends to other nodes."""
    seconds: float
    """Time with nothing beside it; 0 if the wires are not known."""
    copied: float
    """Part of it in which the data stays inside a node, where copy engines can move it."""


Model = Callable[[Cluster, "Sent"], Traffic]


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


def flat(cluster: Cluster, sent: Sent) -> Traffic:
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
    return Traffic(inside=inside, between=between, seconds=seconds, copied=seconds if of.nodes == 1 else 0.0)


def hierarchical(cluster: Cluster, sent: Sent) -> Traffic:
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
    return Traffic(inside=inside, between=between, seconds=seconds, copied=seconds if of.nodes == 1 else inner)


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
class Work:
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

    each: tuple[Traffic, ...]
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


def cost(cluster: Cluster, sent: Sequence[Sent], work: Work, model: Model = flat) -> Cost:
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
