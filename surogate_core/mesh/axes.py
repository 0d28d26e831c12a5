"""The plan of a run's ranks: the axes along which they divide its work, made once from the configuration.

An axis divides the ranks into groups of equal size, which do one thing together. Axes overlap: ranks that share rows
also share out tensors. Settings, stores, traffic, the prediction of memory and the checkpoint read this plan, and what
follows from it is decided here alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from surogate_core.bundles.fabrics import Fabric

AxisName = Literal["ranks", "replicate", "shard", "context", "rows", "expert", "expert_replicate"]
"""The axes: `ranks` are all ranks; `shard` the neighbours that share out tensors, and `replicate` those that have the
same part of them; `context` the neighbours that share rows, and `rows` those that have the same positions of different
rows; `expert` the neighbours that share out experts, and `expert_replicate` those that have the same ones."""
AXES: tuple[AxisName, ...] = get_args(AxisName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Groups of `size` ranks that are `stride` apart."""

    size: int
    stride: int = 1

    def place(self, rank: int) -> int:
        """The number of a rank in its group."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> range:
        """The ranks of a rank's group."""
        first = rank - self.place(rank) * self.stride
        return range(first, first + self.size * self.stride, self.stride)

    def of(self, fabric: Fabric) -> Fabric:
        """The fabric of this rank's group. `fabric`: that of all ranks, connected; all of them call it."""
        span = self.size * self.stride
        near = fabric if span == fabric.world else fabric.within(span)
        return near if self.stride == 1 else near.across(self.stride)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The sizes of the axes, and what the ranks do along them."""

    replicate: int = 1
    """Groups of `shard` ranks, each of which has all parts of what is shared out."""
    shard: int = 1
    """P, neighbouring ranks that share out what `zero_level` and `shard_weights` say."""
    context: int = 1
    """C, neighbouring ranks that share each micro-batch: every one has 1/C of its positions."""
    expert: int = 1
    """Neighbouring ranks that share out the experts of each layer."""
    expert_rows: bool = False
    """Whether they send the row of each choice (`kernels.expert_ranks.RowsExchange`)."""
    expert_balance: float | None = None
    """The largest load of one of them by the mean that is not evened out (`kernels.balancing`); None: none is."""
    zero_level: int = 0
    """Trained state that ranks share out: 1 masters and optimizer state, 2 also gradients, 3 also compute copies. With
    one rank it decides only the order of exact sums.
    """
    shard_weights: bool = False
    """Whether each rank keeps only its part of the weights between their uses, as at level 3: at level 1 of the trained
    ones, with adapters of the frozen ones.
    """
    exact: bool = False
    """Whether gradients are added in an order that does not depend on the number of ranks."""
    micro_batches: int = 1
    """M, micro-batches of an optimizer step of all ranks together. Where their number varies, a number that exact sums
    can divide.
    """
    varying: bool = False
    """Whether the number of micro-batches differs from step to step."""

    def __post_init__(self) -> None:
        unequal = self.varying and not self.reduces_each_micro_step
        assert not (unequal and self.shards_weights), "ranks with unequally many micro-steps cannot gather together"

    @classmethod
    def of(cls, ranks: int, *, shard: int = 0, **others: Any) -> Axes:
        """The plan of this number of ranks. `shard`: those that share out tensors, 0: all. `others`: fields."""
        shard = shard or ranks
        return cls(replicate=ranks // shard, shard=shard, **others)

    @property
    def ranks(self) -> int:
        """N, ranks of the run; each has a GPU of its own."""
        return self.replicate * self.shard

    def along(self, name: AxisName) -> Axis:
        """An axis by its name."""
        match name:
            case "ranks":
                return Axis(size=self.ranks)
            case "replicate":
                return Axis(size=self.replicate, stride=self.shard)
            case "shard":
                return Axis(size=self.shard)
            case "context":
                return Axis(size=self.context)
            case "expert":
                return Axis(size=self.expert)
            case "expert_replicate":
                return Axis(size=self.ranks // self.expert, stride=self.expert)
        return Axis(size=self.ranks // self.context, stride=self.context)

    @property
    def shards(self) -> bool:
        """Whether masters are shared out."""
        return self.zero_level >= 1 and self.ranks > 1

    @property
    def shards_gradients(self) -> bool:
        """Whether gradient sums are shared out."""
        return self.zero_level >= 2 and self.ranks > 1

    @property
    def shards_weights(self) -> bool:
        """Whether weights are shared out between their uses, trained or frozen ones."""
        return (self.shard_weights or self.zero_level == 3) and self.ranks > 1

    @property
    def exchanges(self) -> bool:
        """Whether the programs of layers exchange values among ranks."""
        return self.context > 1 or self.expert > 1

    @property
    def reduces_each_micro_step(self) -> bool:
        """Whether sums over the ranks are made in every micro-step, before those over micro-steps."""
        return self.zero_level >= 2

    @property
    def reduces_later(self) -> bool:
        """Whether a micro-step leaves sums over ranks to the next one (`ShardedGradients`).

        An exact order has no room for that, and where the number of micro-steps varies, none is known to be the last.
        """
        return self.shards_gradients and not self.exact and not self.varying
