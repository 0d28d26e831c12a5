"""The embedding's gradient as the rows of its tokens, which ranks exchange instead of sums as large as the table.

At levels 2 and 3 sums over ranks are made in every micro-step. In those of an embedding that is not tied, only the rows
of the micro-batch's tokens are not zero, and they are few: every rank gathers the rows of all ranks and adds them to
its part of the table's sums. The embedding then needs no buffer for whole sums, so the head's sums stay in it until the
last micro-step.

Shape suffixes: R ranks, N tokens of a micro-batch, D features, V rows of the table, B blocks of a row, G elements of a
block, X blocks of a rank's part of the table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.bundles import FLAT_ALIGNMENT
from surogate_core.engine.ranks.reduce import Allocate, plain_zeros
from surogate_core.engine.ranks.stages import Stages
from surogate_core.engine.schedule import EMBED

if TYPE_CHECKING:
    from surogate_core.engine.planning.assembly import Assembly
    from surogate_core.engine.ranks.sharding import ShardedGroup, Sharing

AT_ONCE = 2**24
"""Most elements of rows that are added at a time, in fp32: 64 MiB."""


class EmbeddingRows:
    """The rows of the embedding's gradient in a micro-step of all ranks (`Assembly.sends_rows`), in static buffers."""

    def __init__(
        self,
        stages: Stages,
        shard: Tensor,
        *,
        start: int,
        tokens: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate = plain_zeros,
    ):
        """`stages`: have a part for each of the R ranks whose rows are added. `shard`: this rank's part of the table's
        sums, 1-D and fp32, which begins with element `start`. `tokens`: N, `width`: D. `allocate`: memory that the
        fabric writes to.
        """
        self._stages, self._shard, self._start, self._tokens = stages, shard, start, tokens
        self._block = math.gcd(width, FLAT_ALIGNMENT)
        """G. Each rank's part of the table is a number of whole blocks."""
        self._ids_RN = allocate(stages.parts * tokens, torch.int64, device).view(stages.parts, tokens)
        self._dx_RND = allocate(stages.parts * tokens * width, dtype, device).view(stages.parts, tokens, width)
        self._added: torch.cuda.Event | None = None

    @classmethod
    def of(cls, assembly: Assembly, sharing: Sharing, group: ShardedGroup | None) -> EmbeddingRows | None:
        """Those of an engine; None if its ranks do not exchange rows. `group`: has the embedding."""
        settings = assembly.settings
        if group is None or not assembly.sends_rows:
            return None
        part = group.parts[EMBED]
        return cls(
            sharing.stages,
            group.own_sums(EMBED),
            start=part.own[0] - part.owners[0][0],
            tokens=settings.tokens,
            width=assembly.model.width,
            dtype=settings.dtype,
            device=settings.device,
            allocate=sharing.mesh.zeros,
        )

    @staticmethod
    def bytes_of_rank(tokens: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of one rank's rows."""
        return tokens * (width * dtype.itemsize + torch.int64.itemsize)

    @staticmethod
    def bytes_of(ranks: int, tokens: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of all ranks' rows, and of those that are being added."""
        added = torch.float32.itemsize * width * min(tokens, EmbeddingRows._tokens_at_once(width))
        return ranks * EmbeddingRows.bytes_of_rank(tokens, width, dtype) + added

    @staticmethod
    def _tokens_at_once(width: int) -> int:
        return max(AT_ONCE // width, 1)

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Ids [R, N] and gradients [R, N, D] of the rows."""
        return self._ids_RN, self._dx_RND

    def keep(self, ids_N: Tensor, dx_ND: Tensor) -> None:
        """Take this rank's rows: token `ids_N[n]` adds `dx_ND[n]` to its row of the table."""
        if self._added is not None:
            torch.cuda.current_stream().wait_event(self._added)
        self._ids_RN[self._stages.own].copy_(ids_N)
        self._dx_RND[self._stages.own].copy_(dx_ND)

    def add(self, *, onto: bool) -> None:
        """Gather the rows of all ranks in the current stream, and add them to this rank's part of the table's sums, in
        the order of the ranks' parts. `onto`: to what it has; otherwise to zeros. All ranks call it.
        """
        shard = self._shard
        if not onto:
            shard.zero_()
        self._stages.gather(self._ids_RN.view(-1), self._tokens)
        self._stages.gather(self._dx_RND.view(-1), self._dx_RND[0].numel())
        if shard.numel():
            at_once = self._tokens_at_once(self._dx_RND.shape[-1])
            for ids_N, dx_ND in zip(self._ids_RN, self._dx_RND, strict=True):
                for ids, dx in zip(ids_N.split(at_once), dx_ND.split(at_once), strict=True):
                    self._add_own_blocks(ids, dx)
        self._added = torch.cuda.current_stream().record_event() if shard.is_cuda else None

    def _add_own_blocks(self, ids_N: Tensor, dx_ND: Tensor) -> None:
        """Add the blocks of rows that lie in this rank's part."""
        blocks = dx_ND.shape[1] // self._block
        own_XG = self._shard.view(-1, self._block)
        first = self._start // self._block
        at_NB = ids_N[:, None] * blocks + torch.arange(-first, blocks - first, device=ids_N.device)
        inside_NB = (at_NB >= 0) & (at_NB < len(own_XG))
        # Blocks of other ranks add zeros, spread over all places: many to one place would be added one after another.
        at_NB %= len(own_XG)
        values_NBG = dx_ND.view(*at_NB.shape, self._block).to(own_XG.dtype, copy=True)
        values_NBG.masked_fill_(~inside_NB[..., None], 0)  # not a product: what is not a number stays in its row
        add_rows(own_XG, at_NB.view(-1), values_NBG.view(-1, self._block))

    def finish(self) -> None:
        """The micro-step ends, and all that was added in it is complete."""
        self._added = None


def add_rows(table_VD: Tensor, ids_N: Tensor, rows_ND: Tensor) -> None:
    """Add each row to that of its id, in an order that does not depend on the timing of threads."""
    if table_VD.device.type == "cpu":
        table_VD.index_add_(0, ids_N, rows_ND.to(table_VD.dtype))
        return
    # It sorts the ids.
    table_VD.index_put_((ids_N,), rows_ND.to(table_VD.dtype), accumulate=True)
