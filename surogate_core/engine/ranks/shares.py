"""What one of several ranks keeps and sends, from the counts of one rank alone.

The figures are those of rank 0, whose parts are the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from surogate_core.bundles import FLAT_ALIGNMENT
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.ranks.lanes import Share
from surogate_core.engine.ranks.reduce import staging_elements
from surogate_core.engine.ranks.sharding import longest_part
from surogate_core.mesh.axes import Axes

GRADIENT = 4
"""Bytes of a gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One kind of tensor that a rank sends to the others in an optimizer step."""

    what: str
    nbytes: int
    """Bytes that a rank sends, and as many that it receives, in all calls of a step."""
    calls: int
    """Collectives of a step."""
    how: Literal["exchange", "gather"]
    beside: Literal["forward", "backward", "both", ""] = ""
    """The computation that runs at the same time; empty if the GPU waits."""
    micro_steps: int = 1
    """Micro-steps of a step in which it runs."""
    ranks: int = 0
    """Ranks among which it is sent; 0 is all."""
    stride: int = 1
    """Their distance from each other: 1 are neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Rank 0's part of everything."""

    settings: EngineSettings
    decayed: tuple[int, ...]
    """Elements of each piece in the flat group that is shared out, from the embedding to the head."""
    undecayed: int
    """Elements of the flat group that every rank keeps whole."""
    frozen: tuple[int, ...]
    """Bytes of each piece's frozen weights as stored."""
    wide: tuple[int, ...] = ()
    """Elements of each flat group that is always in fp32, which every rank keeps whole."""
    experts: int = 0
    """Elements of the flat group of experts that a rank has of those which ranks share out."""
    exchanged: tuple[int, ...] = ()
    """Bytes of each tensor that ranks which share rows, or experts, exchange in a micro-step."""
    replicas_once: bool = False
    """`Assembly.adds_replicas_once`."""
    halves: bool = False
    """`Assembly.exchanges_halves`."""
    rows: int = 0
    """Bytes of a rank's rows of the embedding's gradient; 0 if its sums are reduced (`Assembly.sends_rows`)."""

    @property
    def axes(self) -> Axes:
        """What the ranks divide."""
        return self.settings.axes

    @property
    def ranks(self) -> int:
        """N, the number of ranks."""
        return self.axes.ranks

    @property
    def parts(self) -> int:
        """P, the number of ranks that share out a tensor."""
        return self.axes.shard

    @property
    def _among(self) -> int:
        """`Sent.ranks` of what they send each other."""
        return self.parts if self.axes.replicate > 1 else 0

    @property
    def level(self) -> int:
        """The ZeRO level; 0 with one rank."""
        return self.axes.zero_level if self.axes.shards else 0

    @property
    def shards_base(self) -> bool:
        """Whether frozen weights are shared out."""
        return self.axes.shards_weights and any(self.frozen[1:-1])

    @property
    def shards_layers(self) -> bool:
        """Whether the trained weights of layers are shared out."""
        return self.axes.shards and self.axes.shards_weights

    @property
    def _copied_whole(self) -> Sequence[int]:
        """Elements of each piece whose compute copy every rank has whole."""
        return (self.decayed[0], self.decayed[-1]) if self.shards_layers else self.decayed

    @property
    def flat(self) -> int:
        """Trained elements of the model, with the padding of flat groups."""
        return sum(self.decayed) + self._replicated

    @property
    def _replicated(self) -> int:
        """Elements of the flat groups that a rank does not share out otherwise, at each level."""
        return self.undecayed + sum(self.wide) + self.experts

    def _own(self, elements: int) -> int:
        """The longest part of a piece."""
        return longest_part(elements, self.parts)

    def _even(self, elements: int) -> int:
        """Elements of a piece with all parts as long as the longest one, as it is gathered."""
        return self._own(elements) * self.parts

    def _even_of_all(self, elements: int) -> int:
        """Elements of a group that every rank keeps, with equal parts for all ranks."""
        return longest_part(elements, self.ranks) * self.ranks

    @property
    def _even_experts(self) -> int:
        """Elements of the group of experts, with equal parts for all ranks that have the same ones."""
        size = self.axes.along("expert_replicate").size
        return longest_part(self.experts, size) * size

    # ------------------------------------------------------------------------- what is kept

    @property
    def masters(self) -> int:
        """Elements of the masters of a rank, for which it has optimizer state."""
        return self.flat if self.level == 0 else sum(map(self._own, self.decayed)) + self._replicated

    def master_bytes(self, elements: int) -> int:
        """Bytes of the masters of a rank, which has this number of elements."""
        wide, narrow = sum(self.wide), self.settings.master_dtype.itemsize
        return (elements - wide) * narrow + wide * torch.float32.itemsize

    @property
    def _kept_by_all(self) -> Sequence[int]:
        """Elements of each flat group whose gradients every rank keeps."""
        return [n for n in (sum(self.decayed) if self.level == 0 else 0, self.undecayed, *self.wide) if n]

    @property
    def _summed(self) -> int:
        """Elements of the gradients that a rank sums."""
        return self.flat if self.level < 2 else self.masters

    @property
    def sums(self) -> int:
        """Elements of the gradient sums of a rank, with the padding of those that every rank keeps."""
        padding = sum(self._even_of_all(n) - n for n in self._kept_by_all)
        return self._summed + padding + self._even_experts - self.experts

    @property
    def partial_sums(self) -> int:
        """Elements of the further sums that the fixed order of an exact reduction needs."""
        axes, groups = self.axes, self.axes.along("rows").size
        strided = axes.reduces_each_micro_step
        share = Share.of(axes.micro_batches, rank=0, ranks=groups, exact=axes.exact, strided=strided)
        if share.simple:
            return 0
        further = share.leaves < len(share.sizes)
        return (int(math.log2(share.leaves)) + further) * self._summed

    def copies(self, alone: int) -> int:
        """Bytes of the compute copies of a rank; `alone`: those of one rank alone."""
        if self.level == 0:
            return alone
        return self.whole_copies + self.copies_of_parts

    @property
    def whole_copies(self) -> int:
        """Bytes of the compute copies that a rank has whole beside the parts that it owns. They stay on the device."""
        if self.level == 0:
            return 0
        whole = sum(map(self._even, self._copied_whole))
        # Shared masters are separate from the copies even in the model's dtype, others only if the CPU updates them.
        apart = self.settings.dtype != self.settings.master_dtype or self.settings.update_on_cpu
        replicated = self.undecayed + self.experts if apart else 0
        wide = sum(self.wide) * torch.float32.itemsize if self.settings.update_on_cpu else 0
        return (whole + replicated) * self.settings.dtype.itemsize + wide

    @property
    def copies_of_parts(self) -> int:
        """Bytes of the compute copies of a rank's parts of layers."""
        return sum(map(self._own, self.decayed[1:-1])) * self.settings.dtype.itemsize if self.shards_layers else 0

    def base(self, alone: int) -> int:
        """Bytes of the frozen weights of a rank, with embedding and head whole; `alone`: those of one rank alone."""
        if not self.shards_base:
            return alone
        layers = self.frozen[1:-1]
        return alone - sum(layers) + sum(map(self._part, layers))

    def _part(self, nbytes: int) -> int:
        """Bytes of a rank's part of a layer's frozen weights."""
        return -(-nbytes // (FLAT_ALIGNMENT * self.parts)) * FLAT_ALIGNMENT

    # --------------------------------------------------------------------- what passes through

    def gathered(self, *, from_host: bool) -> int:
        """Bytes of the buffers into which two layers' weights are gathered. `from_host`: whether the rank's parts come
        from host memory.
        """
        if self.shards_base:
            part = self._part(max(self.frozen[1:-1]))
        else:
            largest = max(self.decayed[1:-1], default=0) if self.shards_layers else 0
            part = self._own(largest) * self.settings.dtype.itemsize
        # All parts are as long as the longest one. One is on its way from the host.
        return (2 * self.parts + from_host) * part

    @property
    def _summed_pieces(self) -> Sequence[int]:
        """Elements of each piece that are reduced as whole sums."""
        return (0, *self.decayed[1:]) if self.rows else self.decayed

    @property
    def whole_sums(self) -> int:
        """Bytes of the buffers for the whole gradients of a piece before they are reduced: two layers', and one for
        the embedding or the head.
        """
        if self.level < 2:
            return 0
        return GRADIENT * (2 * max(self.decayed[1:-1], default=0) + max(self._summed_pieces[0], self.decayed[-1]))

    @property
    def staging(self) -> int:
        """Bytes of what a rank receives from the others before it adds it."""
        if self.ranks == 1:
            return 0
        whole = max(self._received(n, self.ranks) for n in (self.undecayed, *self.wide))
        whole = max(whole, self._received(self.experts, self.axes.along("expert_replicate").size))
        pieces = max(self._received(n, self.parts) for n in self._summed_pieces)
        if self.level == 0:
            return max(whole, self._received(sum(self.decayed), self.ranks))
        if self.level == 1:
            return max(whole, pieces)
        replicas = max(self._received(n, self.parts) for n in self.decayed) if self.replicas_once else 0
        return max(whole, replicas) + pieces

    def _received(self, elements: int, parts: int) -> int:
        """Bytes that a rank receives before it adds them, of a range with this number of elements."""
        return GRADIENT * staging_elements(longest_part(elements, parts), parts)

    # ------------------------------------------------------------------------- what is sent

    @property
    def sent(self) -> tuple[Sent, ...]:
        """What a rank sends in an optimizer step; nothing with one rank."""
        if self.ranks == 1:
            return ()
        steps = self.axes.micro_batches // self.axes.along("rows").size
        found = [*self._gradients(steps), *self._weights(steps), *self._base(steps), *self._exchanges(steps)]
        return tuple(sent for sent in found if sent.nbytes)

    def _others(self, nbytes: int, ranks: int = 0) -> int:
        """Bytes that a rank sends, or receives, when the parts of `nbytes` of all ranks, or of P, change hands."""
        ranks = ranks or self.parts
        return nbytes * (ranks - 1) // ranks

    def _exchanges(self, steps: int) -> Sequence[Sent]:
        """What layers exchange, and its gradients, of which a rank keeps one part: the queries, keys and values of
        shared rows, for which the computation waits, or the tokens and outputs of shared experts. As `halves`, the
        second half of what is sent and the first of what comes back are beside it.
        """
        size = self.axes.context * self.axes.expert
        what = "tokens of shared experts" if self.axes.expert > 1 else "heads of shared rows"
        what += ", and experts that move" if self.axes.expert_balance is not None else ""
        waited = Sent(
            what=what,
            nbytes=steps * sum(nbytes * (size - 1) // size for nbytes in self.exchanged),
            calls=steps * len(self.exchanged),
            how="exchange",
            micro_steps=steps,
            ranks=size,
        )
        if not self.halves:
            return [waited]
        half = replace(waited, nbytes=waited.nbytes // 2, calls=waited.calls // 2)
        return [half, replace(half, what=f"{what}, beside products", beside="both")]

    def _gradients(self, steps: int) -> Sequence[Sent]:
        groups = self._kept_by_all
        nbytes = self._others(GRADIENT * sum(map(self._even_of_all, groups)), self.ranks)
        found = [
            Sent(what="gradients that all keep, reduced", nbytes=nbytes, calls=len(groups), how="exchange"),
            Sent(what="gradients that all keep, gathered", nbytes=nbytes, calls=len(groups), how="gather"),
            *self._gradients_of_experts(),
        ]
        if self.level:
            times = 1 if self.level == 1 else steps
            layers, head = sum(self.decayed[1:-1]), self.decayed[-1]
            embedded, headed = self._reductions(steps)
            found += [
                Sent(
                    what="gradients of layers and head",
                    nbytes=times * self._others(GRADIENT * layers) + headed * self._others(GRADIENT * head),
                    calls=times * sum(1 for n in self.decayed[1:-1] if n) + headed * (head > 0),
                    how="exchange",
                    beside="backward",
                    micro_steps=times,
                    ranks=self._among,
                ),
                *(self._rows(steps) if self.rows else self._embedding(embedded)),
                *self._replicas(times, embedded, headed),
            ]
        return found

    def _gradients_of_experts(self) -> Sequence[Sent]:
        """The sums of a rank's experts over the ranks that have the same ones."""
        axis = self.axes.along("expert_replicate")
        if axis.size == 1 or not self.experts:
            return ()
        nbytes = self._others(GRADIENT * self._even_experts, axis.size)
        more: Any = {"nbytes": nbytes, "calls": 1, "ranks": axis.size, "stride": axis.stride}
        return (
            Sent(what="gradients of experts, reduced", how="exchange", **more),
            Sent(what="gradients of experts, gathered", how="gather", **more),
        )

    def _reductions(self, steps: int) -> tuple[int, int]:
        """How often the sums of the embedding, and those of the head, are reduced in a step of `steps` micro-steps."""
        if self.rows:
            return 0, 1  # the buffer that both would share has the head's alone
        times = 1 if self.level == 1 else steps
        return 1 if self.axes.reduces_later and not self.decayed[-1] else times, times

    def _embedding(self, times: int) -> Sequence[Sent]:
        """No backward is left beside the embedding's sums: the next micro-step's forward, or nothing."""
        nbytes = self._others(GRADIENT * self.decayed[0])
        deferred = times - 1 if self.axes.reduces_later else 0
        return (
            Sent(
                what="gradients of the embedding, in the next micro-step",
                nbytes=deferred * nbytes,
                calls=deferred,
                how="exchange",
                beside="forward",
                micro_steps=deferred,
                ranks=self._among,
            ),
            Sent(
                what="gradients of the embedding",
                nbytes=(times - deferred) * nbytes,
                calls=times - deferred,
                how="exchange",
                ranks=self._among,
            ),
        )

    def _rows(self, steps: int) -> Sequence[Sent]:
        """`EmbeddingRows`: ids and gradients."""
        nbytes, deferred = (self.parts - 1) * self.rows, steps - 1
        return (
            Sent(
                what="rows of the embedding's gradient, in the next micro-step",
                nbytes=deferred * nbytes,
                calls=2 * deferred,
                how="gather",
                beside="forward",
                micro_steps=deferred,
                ranks=self._among,
            ),
            Sent(what="rows of the embedding's gradient", nbytes=nbytes, calls=2, how="gather", ranks=self._among),
        )

    def _replicas(self, times: int, embedded: int, headed: int) -> Sequence[Sent]:
        """The sums of a rank's parts over the replicas: exchanged, added, gathered.

        How often in a step: `times` for a layer, `embedded` for the embedding, `headed` for the head.
        """
        replicas = self.axes.replicate
        if replicas == 1:
            return ()
        times, embedded, headed = (1, 1, 1) if self.replicas_once else (times, embedded, headed)
        embed, *layers, head = self.decayed
        elements = embedded * self._own(embed) + times * sum(map(self._own, layers)) + headed * self._own(head)
        nbytes = self._others(GRADIENT * elements, replicas)
        calls = embedded * (embed > 0) + times * sum(1 for n in layers if n) + headed * (head > 0)
        calls = 1 if self.replicas_once else calls
        beside = "" if self.replicas_once else "backward"
        more: Any = {"beside": beside, "micro_steps": times, "ranks": replicas, "stride": self.parts}
        return (
            Sent(what="sums of replicas, reduced", nbytes=nbytes, calls=calls, how="exchange", **more),
            Sent(what="sums of replicas, gathered", nbytes=nbytes, calls=calls, how="gather", **more),
        )

    def _weights(self, steps: int) -> Sequence[Sent]:
        """The compute copies of trained weights."""
        if self.level == 0:
            return ()
        width = self.settings.dtype.itemsize
        once = self._copied_whole
        found = [
            Sent(
                what="updated weights",
                nbytes=self._others(width * sum(map(self._even, once))),
                calls=sum(1 for n in once if n),
                how="gather",
                beside="forward",
                ranks=self._among,
            )
        ]
        if self.shards_layers:
            found.append(self._twice("weights of layers", [width * self._even(n) for n in self.decayed[1:-1]], steps))
        return found

    def _base(self, steps: int) -> Sequence[Sent]:
        if not self.shards_base:
            return ()
        layers = [self._part(nbytes) * self.parts for nbytes in self.frozen[1:-1]]
        return (self._twice("frozen weights of layers", layers, steps),)

    def _twice(self, what: str, layers: Sequence[int], steps: int) -> Sent:
        """Gathered for the forward and for the backward, which finds the last two layers in the buffers.

        `layers`: bytes of all ranks' parts.
        """
        gathered = [*layers, *layers[:-2]]
        return Sent(
            what=what,
            nbytes=steps * self._others(sum(gathered)),
            calls=steps * len(gathered),
            how="gather",
            beside="both",
            micro_steps=steps,
            ranks=self._among,
        )
