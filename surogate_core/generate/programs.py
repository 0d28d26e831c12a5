"""The layers as compiled programs of a fixed number of rows.

A layer is traced with an op that stands for attention and knows nothing of the cache, so that one program serves
prompts and single tokens, every layer of a kind, and every length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from surogate_core.dsl.sides import REAL
from surogate_core.dsl.trace import Function, Signature, without_gradients
from surogate_core.engine.pieces import Piece
from surogate_core.generate.cache import CachedAttention, with_own
from surogate_core.generate.weights import Layer, Weights
from surogate_core.kernels.registry import KernelTable, using

_current: ContextVar[CachedAttention | None] = ContextVar("surogate_cached_attention", default=None)
"""The attention of the runner whose programs run."""


@torch.library.custom_op("surogate::cached_attention", mutates_args=())
def _cached_attention(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, scale: float) -> Tensor:
    attention = _current.get()
    assert attention is not None, "a layer's program runs inside of `Layers.of`"
    return attention(q_NHE, k_NKE, v_NKE, q_NHE.new_empty(0, dtype=torch.int32), 0, scale).contiguous()


@_cached_attention.register_fake
def _(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, scale: float) -> Tensor:
    return q_NHE.new_empty(*q_NHE.shape[:2], v_NKE.shape[2])


def _traced_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    found: Tensor = torch.ops.surogate.cached_attention(q, k, v, scale)
    return found


@dataclass(slots=True)
class Layers:
    """The layers of a model, with attention over a cache."""

    weights: Weights
    attention: CachedAttention
    least_rows: int | None
    """Fewest rows for which the run's compiler makes programs. With fewer, or None, operations run one by one."""
    table: KernelTable = field(init=False)
    """The kernels of programs."""
    _by_key: dict[tuple[str, int], Function] = field(default_factory=dict)
    """(key of a piece, rows) → its program."""

    def __post_init__(self) -> None:
        self.table = with_own(self.weights.programs.kernels, attention=_traced_attention)

    def of(self, rows: int | None) -> Iterator[Layer]:
        """The layers in order for this number of rows; None for any, which never compiles."""
        if rows is None or self.least_rows is None or rows < self.least_rows:
            yield from self.weights.layers()
            return
        try:
            for layer in self.weights.layers(lambda piece: self._program(piece, rows)):
                _current.set(self.attention)
                yield layer
        finally:
            _current.set(None)  # it would keep the cache

    def _program(self, piece: Piece, rows: int) -> Function:
        found = self._by_key.get((piece.key, rows))
        if found is None:
            key = (self.weights.programs.signature(piece), rows)
            known = self.weights.compiled
            if key not in known:
                known[key] = self._compile(piece, rows)
            found = self._by_key[piece.key, rows] = known[key]
        return found

    def _compile(self, piece: Piece, rows: int) -> Function:
        programs, plan = self.weights.programs, self.weights.plan
        task = f"compiling {type(piece.block).__name__} for generation"
        programs.progress(task, 0, 1)
        with using(self.table):
            call = without_gradients(
                programs.layer_function(piece, training=False),
                self._inputs(piece, rows),
                compiler=plan.assembly.settings.compiler,
            )
        programs.progress(task, 1, 1)

        def run(*flat: Tensor) -> Tensor:
            (found,) = call(flat)
            return found

        return run

    def _inputs(self, piece: Piece, rows: int) -> list[Signature]:
        """What the function of a layer takes, with another number of rows."""
        plan = self.weights.plan
        *others, masks, seed = self.weights.programs.layer_inputs(piece)
        first = len(others) - len(plan.tables)
        model = plan.assembly.model
        shown = model.tables(torch.zeros(rows, dtype=torch.int32, device="meta"), self.weights.parameters.dtype)
        shapes = {name: tuple(table.shape) for name, table in shown.items()} | {REAL: (rows,)}
        tables = [replace(s, shape=shapes.get(name, s.shape)) for name, s in plan.tables.items()]
        activation = replace(others[first - 1], shape=(rows, model.width))
        return [*others[: first - 1], activation, *tables, masks, seed]
