"""The layers as compiled programs of a fixed number of rows.

A layer is traced with ops that stand for its mixers and know nothing of the cache, so that one program serves prompts
and single tokens, every layer of a kind, and every length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl.mixers import KeyValues, Scan, States, active_mixing, mixing
from surogate_core.dsl.sides import IDS, REAL
from surogate_core.dsl.trace import Function, Signature, without_gradients
from surogate_core.engine.planning.pieces import Piece
from surogate_core.generate.cache import FromCache
from surogate_core.generate.weights import Layer, Weights
from surogate_core.kernels.registry import using

_SCANS: dict[str, Scan] = {}
"""Name in compiled programs → the scan of a recurrence."""


def _name_of(scan: Scan) -> str:
    """A name that is the same in every process, whatever was compiled before, unless two scans have one."""
    base = f"{scan.__module__}.{scan.__qualname__}"
    names = (base if not number else f"{base} {number}" for number in count())
    name = next(n for n in names if _SCANS.get(n, scan) is scan)
    _SCANS[name] = scan
    return name


def _running() -> FromCache:
    how = active_mixing()
    assert isinstance(how, FromCache), "a layer's program runs inside of `mixing`"
    return how


@torch.library.custom_op("surogate::cached_attention", mutates_args=())
def _cached_attention(
    q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, number: int, scale: float, sinks_H: Tensor | None
) -> Tensor:
    how = _running()
    spec = how.cache.mixers[how.layer][number]
    assert isinstance(spec, KeyValues)
    return how.attend(number, spec, q_NHE, k_NKE, v_NKF, sinks_H).contiguous()


@_cached_attention.register_fake
def _(q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, number: int, scale: float, sinks_H: Tensor | None) -> Tensor:
    return q_NHE.new_empty(*q_NHE.shape[:2], v_NKF.shape[2])


@torch.library.custom_op("surogate::cached_recurrence", mutates_args=())
def _cached_recurrence(
    rows: Sequence[Tensor], parameters: Sequence[Tensor], names: str, number: int, scan: str
) -> Tensor:
    """`names`: JSON of the names of the tensors among the parameters, and of the other parameters by name."""
    how = _running()
    spec = how.cache.mixers[how.layer][number]
    assert isinstance(spec, States)
    return how.recur(number, spec, rows, _named(parameters, names)).contiguous()


def _named(parameters: Sequence[Tensor], names: str) -> dict[str, Any]:
    tensors, others = json.loads(names)
    return dict(zip(tensors, parameters, strict=True)) | others


@_cached_recurrence.register_fake
def _(rows: Sequence[Tensor], parameters: Sequence[Tensor], names: str, number: int, scan: str) -> Tensor:
    y, _ = _SCANS[scan](*rows, borders=None, initial=None, finals=False, **_named(parameters, names))
    return torch.empty_like(y, memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class _Traced:
    """Stands for the mixers in programs, which know nothing of the cache."""

    hides_borders: str = "in generation"

    def attend(self, number: int, spec: KeyValues, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        found: Tensor = torch.ops.surogate.cached_attention(q, k, v, number, spec.scale, sinks)
        return found

    def recur(self, number: int, spec: States, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        tensors = {name: value for name, value in parameters.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in parameters.items() if name not in tensors}
        names, given = json.dumps([[*tensors], others]), list(tensors.values())
        found: Tensor = torch.ops.surogate.cached_recurrence(list(rows), given, names, number, _name_of(spec.scan))
        return found


@dataclass(slots=True)
class Layers:
    """The layers of a model, whose mixers read the cache of the `mixing` in which they run."""

    weights: Weights
    compiles: bool
    """Whether the run's compiler makes programs; otherwise operations run one by one."""
    _by_key: dict[tuple[str, int], Function] = field(default_factory=dict)
    """(key of a piece, rows) → its program."""

    def of(self, rows: int) -> Iterator[Layer]:
        """The layers in order for this number of rows."""
        return self.weights.layers((lambda piece: self._program(piece, rows)) if self.compiles else None)

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
        with using(programs.kernels), mixing(_Traced()):
            call = without_gradients(
                programs.layer_function(piece, training=False),
                self._inputs(piece, rows),
                compiler=plan.assembly.settings.compiler,
            )
        programs.progress(task, 1, 1)

        return lambda *flat: call(flat)

    def _inputs(self, piece: Piece, rows: int) -> list[Signature]:
        """What the function of a layer takes, with another number of rows."""
        plan = self.weights.plan
        *others, masks, seed = self.weights.programs.layer_inputs(piece)
        tables_from = len(others) - len(plan.tables)
        first = tables_from - len(piece.takes)
        taken = [replace(s, shape=(rows, *s.shape[1:])) for s in others[first:tables_from]]
        model = plan.assembly.model
        shown = model.tables(torch.zeros(rows, dtype=torch.int32, device="meta"), self.weights.parameters.dtype)
        shapes = {name: tuple(table.shape) for name, table in shown.items()} | {REAL: (rows,), IDS: (rows,)}
        tables = [replace(s, shape=shapes.get(name, s.shape)) for name, s in plan.tables.items()]
        activation = replace(others[first - 1], shape=(rows, model.width))
        return [*others[: first - 1], activation, *taken, *tables, masks, seed]
