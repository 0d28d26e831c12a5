"""The ops `ssd` and `gated_delta` in Triton. Shape suffixes as in `surogate_core.kernels.scans`.

The kernels have chunks of their own, so `chunk` has no influence on a result. A run's bits depend on the run alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula
from triton import knobs

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import scans_gradients_programs as gradients_programs
from surogate_kernels_triton import scans_programs as programs
from surogate_kernels_triton.attention import padded
from surogate_kernels_triton.scans_tiles import LARGE, ScanTile, ScanTiles, tiles_for

DTYPES = (torch.bfloat16, torch.float32)
WIDEST_KEY = 128
"""Most features of a key."""
WIDEST_VALUE = 256
"""Most features of a value."""
ADDED = 1024
"""Numbers of a program that adds parts."""
HEADS = 16
"""Heads of a program of `scan_decays`."""
PLACES = 32
"""Places of chunks that a program finds."""


def places_of(rows: int, runs: int, chunk: int) -> int:
    """The number of chunks of these runs at most."""
    return min(rows, (rows + runs * (chunk - 1)) // chunk)


def with_adjacent_features(x: Tensor) -> Tensor:
    """The rows, copied if the features of one are not adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True, kw_only=True)
class _Scan:
    """The inputs that all programs share, and their workspaces."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    borders: Tensor
    initial: Tensor | None
    delta: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *rest: Any) -> _Scan:
        """Make it from the arguments of the ops; rows are made adjacent where they are not."""
        borders, initial, delta = rest
        return cls(
            q=with_adjacent_features(q),
            k=with_adjacent_features(k),
            v=with_adjacent_features(v),
            decay=decay.contiguous(),
            beta=beta.contiguous(),
            borders=borders.contiguous(),
            initial=None if initial is None else initial.contiguous(),
            delta=delta,
        )

    @cached_property
    def tiles(self) -> ScanTiles:
        """How the programs cut it."""
        return tiles_for(self.v.device, self.v.dtype, self.delta)

    @property
    def runs(self) -> int:
        """Their number."""
        return self.borders.shape[0] - 1

    @property
    def heads(self) -> int:
        """The number of heads of values."""
        return self.v.shape[1]

    @cached_property
    def places(self) -> int:
        """The most chunks there may be."""
        return places_of(self.v.shape[0], self.runs, self.tiles.chunk)

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """([2, P] the first row of each chunk and the end of its rows, [R] the chunks before each run)."""
        table = self.borders.new_empty((2, self.places), dtype=torch.int32)
        before = self.borders.new_empty(self.runs, dtype=torch.int32)
        programs.scan_places[triton.cdiv(self.places, PLACES),](
            self.borders, self.runs, table, before, self.places, C=self.tiles.chunk, B=PLACES, num_warps=4
        )
        return table, before

    @cached_property
    def decays(self) -> tuple[Tensor, Tensor, Tensor]:
        """(since the beginning of a chunk [N, H], up to its end [N, H], through it [P, H]), in fp32."""
        since, to_end = (torch.empty_like(self.decay, dtype=torch.float32) for _ in range(2))
        through = since.new_empty((self.places, self.heads))
        programs.scan_decays[self.places * triton.cdiv(self.heads, HEADS),](
            *(self.decay, self.table[0], self.places, since, to_end, through),
            H=self.heads,
            C=self.tiles.chunk,
            B=HEADS,
            num_warps=4,
        )
        return since, to_end, through

    def strides(self, *rows: Tensor) -> list[int]:
        """The strides of a row and of a head of each."""
        return [stride for x in rows for stride in x.stride()[:2]]

    def options(self, tile: ScanTile, *, delta: bool = True, features: int = 0) -> dict[str, Any]:
        """Constants and options of a launch. `delta`: whether the program also serves scans without the delta rule;
        `features`: how many of a key it reads at a time, without it all.
        """
        return {
            "H": self.heads,
            "SHARED": self.heads // self.k.shape[1],
            "E": self.k.shape[2],
            "F": self.v.shape[2],
            "EP": features or padded(self.k.shape[2]),
            "FP": tile.f,
            "C": self.tiles.chunk,
            **({"DELTA": self.delta} if delta else {}),
            "WIDE": knobs.runtime.interpret and self.v.dtype == torch.bfloat16,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def carrying(self, tile: ScanTile) -> tuple[int]:
        """The grid of the programs that carry states."""
        return (self.runs * self.heads * triton.cdiv(self.v.shape[2], tile.f),)

    def states(self) -> Tensor:
        """Space for a state of each chunk [P, H, E, F], in the dtype of products."""
        return self.v.new_empty((self.places, self.heads, self.k.shape[2], self.v.shape[2]))

    def squares(self) -> Tensor:
        """Space for a matrix of each chunk [P, H, C, C], likewise."""
        return self.v.new_empty((self.places, self.heads, self.tiles.chunk, self.tiles.chunk))

    def system(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(inverses [P, H, C, C], corrections [N, H, E], values [N, H, F]) of the delta rule, or Nones."""
        if not self.delta:
            return None, None, None
        inverses, (table, _), chunk = self.squares(), self.table, self.tiles.chunk
        corrections = self.v.new_empty((*self.v.shape[:2], self.k.shape[2]))
        values = self.v.new_empty(self.v.shape)
        options = self.options(self.tiles.system, delta=False)
        systems = torch.empty_like(inverses, dtype=torch.float32)
        programs.delta_systems[self.places * self.heads,](
            self.k,
            self.decay,
            self.beta,
            table,
            self.places,
            systems,
            corrections,
            *self.strides(self.k),
            **options,
        )
        blocks: dict[str, Any] = {
            "H": self.heads,
            "C": chunk,
            # About 16 bits of each product, twice as fast as three products in tf32; the interpreter has no such thing.
            "SOLVE": "ieee" if knobs.runtime.interpret or self.v.dtype == torch.float32 else "bf16x3",
            "num_warps": 1,
        }
        grid = (self.places * self.heads * (chunk // programs.BLOCK.value),)
        programs.delta_blocks[grid](systems, table, self.places, **blocks)
        programs.delta_inverses[grid](systems, table, self.places, inverses, **blocks)
        programs.delta_values[self.places * self.heads,](
            self.k,
            self.v,
            self.decays[0],
            self.beta,
            inverses,
            table,
            self.places,
            corrections,
            values,
            *self.strides(self.k, self.v),
            **options,
        )
        return inverses, corrections, values

    def forward(self, corrections: Tensor | None, values: Tensor | None, finals: Tensor | None) -> Tensor:
        """The states that enter the chunks; fills `finals`, and makes `values` the new ones."""
        states = self.states()
        programs.scan_states[self.carrying(self.tiles.carried)](
            self.k,
            self.v,
            *self.decays[1:],
            self.beta,
            corrections,
            values,
            self.borders,
            self.table[1],
            self.initial,
            states,
            finals,
            *self.strides(self.k, self.v),
            **self.options(self.tiles.carried),
        )
        return states

    def outputs(self, values: Tensor | None, states: Tensor, y: Tensor) -> None:
        """Fills y."""
        programs.scan_outputs[self.places * self.heads,](
            self.q,
            self.k,
            self.v,
            self.decay,
            self.decays[0],
            self.beta,
            values,
            self.table[0],
            self.places,
            states,
            y,
            *self.strides(self.q, self.k, self.v),
            **self.options(self.tiles.local),
        )

    def backward_states(
        self, dy: Tensor, corrections: Tensor | None, dfinals: Tensor | None, dinitial: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(gradients of the states that leave the chunks, of the new values of the delta rule); fills `dinitial`."""
        table, before = self.table
        dvalues = torch.empty_like(dy) if self.delta else None
        if self.delta:
            gradients_programs.delta_value_gradients[self.places * self.heads,](
                self.q,
                self.k,
                dy,
                self.decay,
                table,
                self.places,
                dvalues,
                *self.strides(self.q, self.k),
                **self.options(self.tiles.local, delta=False),
            )
        dstates = self.states()
        gradients_programs.scan_state_gradients[self.carrying(self.tiles.carried)](
            self.q,
            self.k,
            dy,
            *self.decays,
            corrections,
            dvalues,
            self.borders,
            before,
            dfinals,
            dstates,
            dinitial,
            *self.strides(self.q, self.k),
            **self.options(self.tiles.carried),
        )
        return dstates, dvalues

    def backward(
        self, dy: Tensor, dfinals: Tensor | None, dinitial: Tensor | None, gradients: Sequence[Tensor]
    ) -> None:
        """Fills the gradients of q, k, v, the decays and the rates, and `dinitial`."""
        inverses, corrections, values = self.system()
        states = self.forward(corrections, values, None)
        dstates, dvalues = self.backward_states(dy, corrections, dfinals, dinitial)
        dq, dk, dv, ddecay, dbeta = gradients
        features = min(self.tiles.keys.e, padded(self.k.shape[2]))
        of_keys = triton.cdiv(self.k.shape[2], features)
        ddecays = ddecay.new_empty((1 + of_keys, *ddecay.shape), dtype=torch.float32)
        dbetas = dbeta.new_empty((1 + of_keys if self.delta else 1, *dbeta.shape), dtype=torch.float32)
        rows, strides = (self.q, self.k, self.v, dy), self.strides(self.q, self.k, self.v)
        given = (self.beta, inverses, values, dvalues, self.table[0], self.places, states, dstates)
        squares, parts = (self.squares(), self.squares() if self.delta else None), (ddecays, dbetas)
        gradients_programs.scan_value_gradients[self.places * self.heads,](
            *(*rows, self.decay, self.decays[1], *given, *squares, dv, *parts, *strides),
            **self.options(self.tiles.values),
        )
        gradients_programs.scan_key_gradients[self.places * self.k.shape[1] * of_keys,](
            *(*rows, *self.decays, *given, *squares, dq, dk, *parts, ddecay.numel(), *strides),
            **self.options(self.tiles.keys, features=features),
        )
        gradients_programs.add_parts[triton.cdiv(ddecay.numel(), ADDED),](
            *(*parts, ddecay, dbeta, ddecay.numel()), PARTS=1 + of_keys, DELTA=self.delta, B=ADDED, num_warps=4
        )


def _dense(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _finals(v_NHF: Tensor, k_NGE: Tensor, runs: int) -> Tensor:
    return v_NHF.new_empty((runs, v_NHF.shape[1], k_NGE.shape[2], v_NHF.shape[2]), dtype=torch.float32)


def _passed_on(state: Tensor, source: Tensor | None) -> None:
    """Without rows the states behind runs are those before them."""
    state.zero_() if source is None else state.copy_(source)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::chunked_scan", mutates_args=())
def _forward(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    finals: bool,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    y, last = _dense(v_NHF), _finals(v_NHF, k_NGE, len(borders) - 1 if finals else 0)
    if not v_NHF.shape[0]:
        if finals:
            _passed_on(last, initial)
        return y, last
    scan = _Scan.of(q_NGE, k_NGE, v_NHF, decay_NH, beta_NH, borders, initial, delta)
    _, corrections, values = scan.system()
    states = scan.forward(corrections, values, last if finals else None)
    scan.outputs(values, states, y)
    return y, last


@_forward.register_fake
def _(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    finals: bool,
    delta: bool,
) -> tuple[Tensor, Tensor]:
    return _dense(v_NHF), _finals(v_NHF, k_NGE, len(borders) - 1 if finals else 0)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::chunked_scan_backward", mutates_args=())
def _backward(
    dy_NHF: Tensor,
    dfinals: Tensor | None,
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH)
    dq, dk, dv, ddecay, dbeta = gradients = tuple(_dense(x) for x in inputs)
    dinitial = _dinitial(v_NHF, initial)
    dfinals = None if dfinals is None else dfinals.contiguous()
    if v_NHF.shape[0]:
        scan = _Scan.of(*inputs, borders, initial, delta)
        scan.backward(dy_NHF.contiguous(), dfinals, None if initial is None else dinitial, gradients)
    elif initial is not None:
        _passed_on(dinitial, dfinals)
    return dq, dk, dv, ddecay, dbeta, dinitial


def _dinitial(v_NHF: Tensor, initial: Tensor | None) -> Tensor:
    return v_NHF.new_empty(0) if initial is None else _dense(initial)


@_backward.register_fake
def _(
    dy_NHF: Tensor,
    dfinals: Tensor | None,
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None,
    delta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, ddecay, dbeta = (_dense(x) for x in (q_NGE, k_NGE, v_NHF, decay_NH, beta_NH))
    return dq, dk, dv, ddecay, dbeta, _dinitial(v_NHF, initial)


class _ChunkedScan(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, finals, delta = arguments
        y, last = _forward(*tensors, finals, delta)
        ctx.save_for_backward(*tensors)
        ctx.delta = delta
        ctx.set_materialize_grads(False)
        if not finals:
            ctx.mark_non_differentiable(last)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinals: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        if dy is None:
            dy = torch.zeros_like(tensors[2])
        *found, dinitial = _backward(dy, dfinals, *tensors, ctx.delta)
        return (*found, None, None if tensors[-1] is None else dinitial, None, None)


def gated_delta(
    *rows: Tensor, initial: Tensor | None = None, finals: bool = False, chunk: int = 0
) -> tuple[Tensor, Tensor]:
    """`scans.gated_delta` of (q, k, v, decay, beta, borders)."""
    with compute.region("att"):
        found: tuple[Tensor, Tensor] = _ChunkedScan.apply(*rows, initial, finals, True)
        return found


def ssd(
    x_NHF: Tensor,
    b_NGE: Tensor,
    c_NGE: Tensor,
    *rest: Tensor,
    initial: Tensor | None = None,
    finals: bool = False,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """`scans.ssd`; `rest`: decay, dt, borders."""
    with compute.region("att"):
        found: tuple[Tensor, Tensor] = _ChunkedScan.apply(c_NGE, b_NGE, x_NHF, *rest, initial, finals, False)
        return found


def _takes(
    q_NGE: Tensor,
    k_NGE: Tensor,
    v_NHF: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    borders: Tensor,
    initial: Tensor | None = None,
    **named: Any,
) -> bool:
    """Whether blocks hold the features, and all rows are multiplied in one dtype."""
    features, values = k_NGE.shape[2], v_NHF.shape[2]
    fits = 0 < features <= WIDEST_KEY and 0 < values <= WIDEST_VALUE and features % 8 == values % 8 == 0
    alike = q_NGE.dtype == k_NGE.dtype == v_NHF.dtype
    whole = all(x.dtype in (*DTYPES, torch.float16) for x in (decay_NH, beta_NH))
    state = borders.shape[0] - 1, v_NHF.shape[1], features, values
    before = initial is None or (initial.dtype == torch.float32 and initial.shape == state)
    return fits and alike and whole and before


def takes_delta(q_NGE: Tensor, k_NGE: Tensor, v_NHF: Tensor, *rest: Any, **named: Any) -> bool:
    """Whether `gated_delta` can be computed here."""
    return _takes(q_NGE, k_NGE, v_NHF, *rest, **named)


def takes_ssd(x_NHF: Tensor, b_NGE: Tensor, c_NGE: Tensor, *rest: Any, **named: Any) -> bool:
    """Whether `ssd` can be computed here."""
    return _takes(c_NGE, b_NGE, x_NHF, *rest, **named)


def kernels() -> tuple[bundles.Kernel, ...]:
    """The kernels of both ops."""
    kernel = partial(
        bundles.Kernel,
        name="triton",
        supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
        knows=frozenset({"initial", "finals", "chunk"}),
        priority=10,
    )
    return (
        kernel(op="ssd", function=ssd, takes=takes_ssd),
        kernel(op="gated_delta", function=gated_delta, takes=takes_delta),
    )


def _products(k_shape: Sequence[int], v_shape: Sequence[int], delta: bool) -> int:
    """Multiplications of the forward in chunks of 64 rows, as the reference counts them."""
    rows, heads, values = v_shape
    keys, chunk = k_shape[2], LARGE.chunk
    inside, system = chunk * (keys + values), chunk * (2 * keys + values + chunk)
    return rows * heads * (inside + 2 * keys * values + (system + keys * values if delta else 0))


@register_flop_formula(torch.ops.surogate_triton.chunked_scan)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, *others: Any, **named: Any) -> int:
    return 2 * _products(k_shape, v_shape, others[-1])


@register_flop_formula(torch.ops.surogate_triton.chunked_scan_backward)
def _backward_flops(dy: Any, dfinals: Any, q_shape: Any, k_shape: Any, v_shape: Any, *others: Any, **named: Any) -> int:
    """The forward again, and two products for each of its products."""
    return 6 * _products(k_shape, v_shape, others[-1])


def _bytes(tensors: Sequence[Tensor], delta: bool, states: int, squares: int, values: int) -> int:
    """Bytes of workspaces for q, k, v, decays, rates and borders: these numbers of [P, H, E, F], of [P, H, C, C] and of
    [N, H, F], corrections and decays. Systems are gone before there are states.
    """
    _, k_NGE, v_NHF, *_, borders = tensors
    rows, heads, width = v_NHF.shape
    chunk, features = tiles_for(v_NHF.device, v_NHF.dtype, delta).chunk, k_NGE.shape[2]
    places, size = places_of(rows, len(borders) - 1, chunk), v_NHF.element_size()
    found = max(states * features * width * size, 4 * chunk**2 if delta else 0) + squares * chunk**2 * size
    found *= places * heads
    if delta:
        found += rows * heads * (features + values * width) * size
    return found + 4 * (2 * places + len(borders) + (2 * rows + places) * heads)


def _bytes_of_parts(k_NGE: Tensor, v_NHF: Tensor, delta: bool) -> int:
    """Bytes of the parts of the gradients of decays and rates."""
    rows, heads, _ = v_NHF.shape
    features = k_NGE.shape[2]
    of_keys = triton.cdiv(features, min(tiles_for(v_NHF.device, v_NHF.dtype, delta).keys.e, padded(features)))
    return 4 * rows * heads * (2 + (2 if delta else 1) * of_keys)


@compute.workspace(torch.ops.surogate_triton.chunked_scan)
def _forward_bytes(*arguments: Any) -> int:
    """A state of each chunk; of the delta rule also inverses, corrections and new values."""
    delta = arguments[8]
    return _bytes(arguments[:6], delta, 1, int(delta), 1)


@compute.workspace(torch.ops.surogate_triton.chunked_scan_backward)
def _backward_bytes(*arguments: Any) -> int:
    """A state of each chunk and its gradient, the gradients of products of keys, parts of those of decays; of the delta
    rule also inverses, corrections, new values and their gradients.
    """
    delta = arguments[9]
    parts = _bytes_of_parts(arguments[3], arguments[4], delta)
    return _bytes(arguments[2:8], delta, 2, 3 if delta else 1, 2) + parts
