"""Mixers: the parts of a block that look at other positions, declared in its class and called once in `forward`.

A mixer is declared as a linear slot is, and the declaration is what `forward` calls, so the two cannot differ. Whoever
runs a block says how its rows see each other (`Mixing`): packed documents in training and evaluation, a cache in
generation. Everything between the calls of mixers is computed position by position.

Shape suffixes: N rows, H query heads, K key/value heads, E features of a query and a key, F features of a value, C
channels, W positions of a convolution, R runs of rows that follow each other (documents, or parts of one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from surogate_core.dsl.dims import Dim, Number, number_of, size_of
from surogate_core.dsl.sides import RelayedSpec
from surogate_core.errors import PluginError, UserError
from surogate_core.kernels import ops
from surogate_core.kernels.convolutions import causal_convolution_scan, causal_convolution_step
from surogate_core.kernels.heads import ranks_sharing_rows
from surogate_core.kernels.scans import (
    gated_delta_scan,
    gated_delta_step,
    scan_multiplications,
    ssd_scan,
    ssd_step,
)
from surogate_core.kernels.states import moved_on

if TYPE_CHECKING:
    from surogate_core.dsl.declare import Block

BORDERS = "cu_seqlens"
"""The table that says where documents begin."""

Scan = Callable[..., tuple[Tensor, Sequence[Tensor]]]
"""(*rows, borders, initial, finals, **parameters) → (y [N, …], final states [R, …] fp32).

`borders` [R + 1] int32: the first row of each run and the number of rows; runs may be empty. None: every row is a run,
as in a decoding step. `initial`: the states [R, …] fp32 before each run; None: zeros. `finals`: whether the final
states are wanted. What a run gives does not depend on its place among the rows, nor on other runs.
"""

Step = Callable[..., Tensor]
"""(*rows, *states, slots, **parameters) → y [N, …]: one row of each of N slots, whose states are moved on in place.

`states` [S, …] fp32: those of all slots. `slots` [N] int64: no two rows have the same one, but several may have the
last. That is for rows that do not count: it holds zeros, and must hold zeros afterwards.
"""

_STEPS: Sequence[tuple[Scan, Step]] = (
    (causal_convolution_scan, causal_convolution_step),
    (gated_delta_scan, gated_delta_step),
    (ssd_scan, ssd_step),
)
"""The scans of the core, and what advances their states by a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValues:
    """An attention as its block declares it."""

    name: str
    heads: int
    kv_heads: int
    keys: int
    """E."""
    values: int
    """F."""
    scale: float
    window: int
    """Positions that one sees, itself among them; 0: all before it."""
    softcap: float
    sinks: bool = False
    """Whether each head has a further score whose value is zero."""
    lends: bool = False
    """Whether later layers have its keys and values too."""
    borrows: bool = False
    """Whether its keys and values are those of an earlier layer."""
    lender: tuple[int, int] | None = None
    """In generation, where they are borrowed: the number of that layer, and of its mixer."""

    @property
    def relayed(self) -> tuple[RelayedSpec, RelayedSpec]:
        """The keys and values that layers give each other, in this order."""
        return (
            RelayedSpec(f"{self.name}.keys", (self.kv_heads, self.keys)),
            RelayedSpec(f"{self.name}.values", (self.kv_heads, self.values)),
        )

    @property
    def extensions(self) -> frozenset[str]:
        """What a kernel must know beyond plain causal attention."""
        return frozenset(name for name in ("window", "softcap", "sinks") if getattr(self, name))

    def named(self, sinks: Tensor | None) -> dict[str, Any]:
        """The extensions of a call."""
        values = {"window": self.window, "softcap": self.softcap, "sinks": sinks}
        return {name: values[name] for name in self.extensions}

    def check(self, kind: type, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
        """Refuse rows of other shapes than the declared ones."""
        if (None if sinks is None else tuple(sinks.shape)) != ((self.heads,) if self.sinks else None):
            how = f"sinks of shape {tuple(sinks.shape)}" if sinks is not None else "no sinks"
            raise PluginError(
                f"{_name_of(kind)}: {self.name} is called with {how}, and is declared with sinks={self.sinks} and "
                f"{self.heads} heads. Fix: declare Attention(..., sinks=True) and give one number for each head"
            )
        found = tuple(q.shape[1:]), tuple(k.shape[1:]), tuple(v.shape[1:])
        declared = (self.heads, self.keys), (self.kv_heads, self.keys), (self.kv_heads, self.values)
        if found != declared:
            raise PluginError(
                f"{_name_of(kind)}: {self.name} is called with heads and features {found} of queries, keys and values, "
                f"and is declared with {declared}. Fix: declare Attention with the block's sizes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """A recurrence as its block declares it."""

    name: str
    scan: Scan
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the states of one sequence."""
    multiplications: int
    """Multiplications for one row, without its linear slots."""
    step: Step | None = None

    def advance(
        self, rows: Sequence[Tensor], states: Sequence[Tensor], slots: Tensor, parameters: Mapping[str, Tensor]
    ) -> Tensor:
        """y [N, …] of a decoding step, which moves the states on; by the scan if there is no `step`. See `Step`."""
        if self.step is not None:
            return self.step(*rows, *states, slots, **parameters)
        return moved_on(lambda before: self.run(rows, None, before, parameters), states, slots)

    def run(
        self,
        rows: Sequence[Tensor],
        borders: Tensor | None,
        initial: Sequence[Tensor] | None,
        parameters: Mapping[str, Tensor],
        *,
        wanted: bool = True,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """(y, final states) of the scan. Refuses states that are not the declared ones: the next row begins there. A
        scan may give anything where they are not wanted; the core's own give no state of the right shape.
        """
        y, finals = self.scan(*rows, borders=borders, initial=initial, finals=wanted, **parameters)
        if not wanted and [state.ndim for state in finals] != [len(shape) + 1 for shape in self.shapes]:
            return y, ()
        found = tuple(tuple(state.shape[1:]) for state in finals)
        if found != self.shapes or any(state.dtype.itemsize < 4 for state in finals):
            kinds = ", ".join(str(state.dtype).removeprefix("torch.") for state in finals)
            raise PluginError(
                f"{self.name}: its scan gives states of shapes {found} in {kinds or 'no dtype'}, and is declared with "
                f"{self.shapes}, which are fp32. Fix: declare Recurrence with the shapes that the scan carries"
            )
        return y, finals


Spec = KeyValues | States


class Mixing(Protocol):
    """How the rows of a block see each other. `number`: the mixer's, in the order of declaration."""

    @property
    def hides_borders(self) -> str:
        """Where a block cannot read the documents' borders itself, for a message; empty where it can."""

    def attend(self, number: int, spec: KeyValues, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """[N, H, F]."""

    def recur(self, number: int, spec: States, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """[N, …], what the scan gives."""


_active: ContextVar[Mixing | None] = ContextVar("surogate_mixing", default=None)


@contextmanager
def mixing(how: Mixing) -> Iterator[None]:
    """Blocks that run inside see other positions this way, instead of by the documents of their tables."""
    token = _active.set(how)
    try:
        yield
    finally:
        _active.reset(token)


def active_mixing() -> Mixing | None:
    """The innermost `mixing`."""
    return _active.get()


@dataclass(frozen=True, slots=True)
class Packed:
    """Whole documents, one after the other: training, evaluation, and prompts."""

    borders: Tensor | None
    """[S] int32."""
    longest: int
    """At least the length of every document."""
    hides_borders: str = ""

    def attend(self, number: int, spec: KeyValues, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """By the op `attention`."""
        assert self.borders is not None, "a block with mixers gets the documents' borders"
        return ops.attention(q, k, v, self.borders, self.longest, spec.scale, **spec.named(sinks))

    def recur(self, number: int, spec: States, rows: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Every document from zeros."""
        return spec.run(rows, self.borders, None, parameters, wanted=False)[0]


class Mixer:
    """Base of what a block declares; `spec` is it with sizes."""

    name = owner = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.owner = name, _name_of(owner)

    def spec(self, config: Mapping[str, Any]) -> Spec:
        """The declaration under a ``config.json`` mapping."""
        raise NotImplementedError

    def _call(self, bound: Block) -> tuple[int, Spec, Mixing]:
        """(number, declaration, how rows see each other) of the call that begins."""
        number = next(n for n, mixer in enumerate(bound._mixers) if mixer is self)
        return number, *bound._calls.begin(number)


class Attention(Mixer):
    """Causal attention with grouped queries; read on a block it is `attend`.

    `features` E of queries and keys, `values` F of values (by default E), `scale` of the scores (by default E^-0.5),
    `window`: positions that one sees, itself among them (0: all before it), `softcap` c: scores become c·tanh(s / c),
    `sinks`: whether it is called with a further score of each head, whose value is zero.

    `lends`: later layers have its keys and values too. `borrows`: it is called with queries alone, `attend(q)`, and has
    the keys and values of the layer that `Model.source` names, whose `Attention` lends them.
    """

    def __init__(
        self,
        heads: Dim | int,
        kv_heads: Dim | int,
        features: Dim | int,
        *,
        values: Dim | int | None = None,
        scale: Number | None = None,
        window: Number = 0,
        softcap: Number = 0.0,
        sinks: bool = False,
        lends: bool = False,
        borrows: bool = False,
    ):
        if lends and borrows:
            raise ValueError("an Attention lends the keys and values that it makes, or borrows those of another layer")
        self.lends, self.borrows = lends, borrows
        self.heads, self.kv_heads, self.features = heads, kv_heads, features
        self.values = features if values is None else values
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else _Attend(self, bound)

    def spec(self, config: Mapping[str, Any]) -> KeyValues:
        """The declaration under a ``config.json`` mapping. Raises `UserError` naming a key that makes none."""
        keys, heads, kv_heads = (size_of(size, config) for size in (self.features, self.heads, self.kv_heads))
        if heads % kv_heads:
            raise UserError(
                f"config.json: {self.name} has {heads} heads (`{self.heads}`), which must be a multiple of its "
                f"{kv_heads} heads of keys (`{self.kv_heads}`)."
            )

        def number(which: str, value: Any, **bounds: Any) -> float:
            return number_of(value, config, f"the {which} of {self.name}", **bounds)

        return KeyValues(
            name=self.name,
            heads=heads,
            kv_heads=kv_heads,
            keys=keys,
            values=size_of(self.values, config),
            scale=keys**-0.5 if self.scale is None else number("scale", self.scale),
            window=int(number("window", self.window, least=0, whole=True, absent=0)),
            softcap=number("soft cap", self.softcap, least=0, absent=0),
            sinks=self.sinks,
            lends=self.lends,
            borrows=self.borrows,
        )


@dataclass(slots=True)
class _Attend:
    mixer: Attention
    block: Block

    def __call__(
        self, q_NHE: Tensor, k_NKE: Tensor | None = None, v_NKF: Tensor | None = None, *, sinks: Tensor | None = None
    ) -> Tensor:
        """[N, H, F]; `sinks` [H]. Keys and values where they are not borrowed."""
        number, spec, how = self.mixer._call(self.block)
        assert isinstance(spec, KeyValues)
        if (k_NKE is None or v_NKF is None) != spec.borrows:
            called, fix = ("with", "call it with queries alone") if spec.borrows else ("without", "give both")
            raise PluginError(
                f"{_name_of(type(self.block))}: {spec.name} is called {called} keys and values, and is declared with "
                f"borrows={spec.borrows}. Fix: {fix}"
            )
        if k_NKE is None or v_NKF is None:
            k_NKE, v_NKF = (self.block.taken[one.name] for one in spec.relayed)
        elif spec.lends:
            self.block.given.update((one.name, rows) for one, rows in zip(spec.relayed, (k_NKE, v_NKF), strict=True))
        spec.check(type(self.block), q_NHE, k_NKE, v_NKF, sinks)
        return how.attend(number, spec, q_NHE, k_NKE, v_NKF, sinks)


class Recurrence(Mixer):
    """A scan over the rows of a document; read on a block it is called with `(*rows, **parameters)`.

    `rows` have N first. `parameters` do not: weights and the like. `states`: the shapes of what the scan carries from
    row to row, in fp32. `multiplications` of a row, for FLOPs; by default as in a scan of the core, otherwise two
    for each element of the states. `step`: advances states in a cache by a row (`Step`); by default that of a scan of
    the core, otherwise the scan does it, on copies of the states.
    """

    def __init__(
        self,
        scan: Scan,
        *states: tuple[Dim | int, ...],
        multiplications: Dim | int | None = None,
        step: Step | None = None,
    ):
        self.scan, self.states, self.multiplications = scan, states, multiplications
        self.step = next((own for known, own in _STEPS if known is scan), None) if step is None else step

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else _Recur(self, bound)

    def spec(self, config: Mapping[str, Any]) -> States:
        """The declaration under a ``config.json`` mapping."""
        shapes = tuple(tuple(size_of(d, config) for d in dims) for dims in self.states)
        count = self.multiplications
        return States(
            name=f"{self.owner}.{self.name}",
            scan=self.scan,
            shapes=shapes,
            multiplications=sum(scan_multiplications(self.scan, s) for s in shapes)
            if count is None
            else size_of(count, config),
            step=self.step,
        )


class Convolution(Recurrence):
    """A causal convolution of each channel over `width` positions, called with `(x_NC, weight_CW=, bias_C=)`."""

    def __init__(self, channels: Dim | int, width: int):
        if width < 2:
            raise ValueError(f"a convolution over {width} position looks at no other; multiply instead")
        self.width = width
        super().__init__(causal_convolution_scan, (width - 1, channels), multiplications=channels * width)


@dataclass(slots=True)
class _Recur:
    mixer: Recurrence
    block: Block

    def __call__(self, *rows: Tensor, **parameters: Tensor) -> Tensor:
        number, spec, how = self.mixer._call(self.block)
        assert isinstance(spec, States)
        return how.recur(number, spec, rows, parameters)


class Calls:
    """The calls of mixers in one run of a block's `forward`."""

    def __init__(self, block: Block, how: Mixing | None):
        self.block, self.how = block, how
        self.counts = [0] * len(block._mixers)
        self.reads_borders = False
        """Whether the block looks at other positions in a way of its own."""

    def begin(self, number: int) -> tuple[Spec, Mixing]:
        """(declaration, how rows see each other) of a mixer that is called."""
        self.counts[number] += 1
        if self.how is None:
            raise PluginError(
                f"{_name_of(type(self.block))}: {self.block._mixers[number].name} is called outside of "
                f"`Block.outputs`. Fix: run a block by `outputs`"
            )
        return self.block.mixer_specs()[number], self.how

    def finish(self) -> None:
        """Refuse mixers that were not called once: each has one cache. A block that reads the borders itself may leave
        those of its base class out.
        """
        for mixer, count in zip(self.block._mixers, self.counts, strict=True):
            if count > 1 or not (count or self.reads_borders):
                raise PluginError(
                    f"{_name_of(type(self.block))}: forward calls {mixer.name} {count} times, and a mixer is called "
                    f"once. Fix: declare one for each call, which has a cache of its own, and none that is not called"
                )


class _Tables(dict[str, Tensor]):
    """The tables as a block reads them. `where` it cannot read the documents' borders, if not empty."""

    def __init__(self, tables: Mapping[str, Tensor], calls: Calls, where: str):
        super().__init__({name: table for name, table in tables.items() if name != BORDERS})
        self.borders, self.calls, self.where = tables.get(BORDERS), calls, where

    def __missing__(self, name: str) -> Tensor:
        if name != BORDERS or self.borders is None:
            raise KeyError(name)
        if self.where:
            block = self.calls.block
            declared = ", ".join(mixer.name for mixer in block._mixers) or "none"
            raise UserError(
                f"{_name_of(type(block))} reads {BORDERS} itself, and {self.where} it cannot: what it needs of other "
                f"positions is not declared (declared mixers: {declared}). Fix: use an Attention, Recurrence or "
                f"Convolution that is declared in the class"
            )
        self.calls.reads_borders = True
        return self.borders

    def get(self, name: str, default: Any = None) -> Any:
        """As of any mapping; the borders count as read."""
        return self[name] if name == BORDERS else super().get(name, default)


def begin(block: Block, tables: Mapping[str, Tensor]) -> tuple[Calls, Mapping[str, Tensor]]:
    """(the calls that follow, the tables as the block may read them), before `forward` runs."""
    how, where = _active.get(), ""
    if how is None:
        how = Packed(tables.get(BORDERS), block.max_seqlen)
        if size := ranks_sharing_rows():
            where = "where GPUs share a row"
            for mixer in block._mixers:
                if isinstance(mixer, Recurrence):
                    raise UserError(
                        f"{_name_of(type(block))}: context_parallel_size is {size}, and {mixer.name} is a recurrence "
                        f"or a convolution, which needs the rows of a document in one place. Fix: "
                        f"context_parallel_size=1"
                    )
    calls = Calls(block, how)
    return calls, _Tables(tables, calls, where or how.hides_borders)


def declared_in(cls: type) -> tuple[Mixer, ...]:
    """The mixers of a class, in order; None takes one of a base away. `PluginError` if something else hides one."""
    found: dict[str, Mixer] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, Mixer):
                if name not in found and any(name in vars(b) for b in cls.__mro__ if b.__module__ == BASE):
                    raise PluginError(f"{_name_of(cls)}: the mixer {name} hides what every block has. Fix: rename it")
                found[name] = value
            elif value is None:
                found.pop(name, None)
            elif name in found:
                raise PluginError(
                    f"{_name_of(cls)}: {name} is a mixer of a base class and {type(value).__name__} here. Fix: rename "
                    f"one of them"
                )
    return tuple(found.values())


BASE = "surogate_core.dsl.declare"
"""The module of `Block`."""


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
