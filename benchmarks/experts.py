"""Kernels of experts alone, in TFLOP/s or GB/s, with the shapes of Qwen3-30B-A3B: each variant by its name.

    python benchmarks/experts.py [--tokens 8192 16384] [--loads even zipf] [--out experts.json]
    python benchmarks/experts.py --cases gate_up_full combined_full layer --variants triton-fused triton-adapters
    python benchmarks/experts.py --cases product --tiles 128x256x64w8s3c 128x128x64w4s4
    python benchmarks/experts.py --small                 # tiny, on a CPU, references alone
    TRITON_INTERPRET=1 python benchmarks/experts.py --small    # and Triton's programs in its interpreter

`zipf` draws experts so that the largest has `--skew` times the mean. Cases: `product` (gate, rows sorted),
`product_down`, `product_dx`, `product_fp8` (gate under recipe fp8-hybrid, Hopper only), `product_fp8_down`,
`rounding_fp8` (rows to codes), `factors` (gradient of trained weights), `route`, `combine`, `gate_up` and `down`
(`grouped_linears` with adapters of rank 16), `combined` (down and the sum of its rows), `layer` (all of it and SwiGLU);
`_full` in a name, and `layer`: forward and backward. Cases of ops are compiled as the engine compiles a layer, with the
kernels of the variant; `reference` is compiled by Inductor, with torch's grouped products.

`--cases factors --variants unpadded` sums over no rows where an expert has none, which a kernel may not survive: run it
under a timeout.

A time is the median of replays of a CUDA graph with a cold L2 cache. `error`: of the results against the first variant
of the case, relative. `equal`: whether two runs give equal bits. `kernels` in the JSON: those that were chosen.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from replays import Run, cpu_ms, gpu_ms, relative
from torch import Tensor

from surogate_core.dsl.trace import Compiler, Recompute, Signature, differentiate, without_gradients
from surogate_core.formats import fp8_rows
from surogate_core.kernels import experts as ops
from surogate_core.kernels import grouped
from surogate_core.kernels.ops import swiglu
from surogate_core.kernels.registry import KernelTable, references, using

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A layer with experts; `choices` of a token."""

    experts: int = 128
    choices: int = 8
    width: int = 2048
    inner: int = 768
    rank: int = 16


SMALL = Shape(experts=8, choices=2, width=64, inner=48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the cases share."""

    shape: Shape
    tokens: int
    device: torch.device
    dtype: torch.dtype
    logits_NE: Tensor
    routes: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        return self.tokens * self.shape.choices

    def drawn(self, *size: int, scale: float = 1.0) -> Tensor:
        """Random values."""
        return (torch.randn(size, device=self.device) * scale).to(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compute a case."""

    name: str
    make: Callable[[], Run]
    """Compiles it."""
    flops: float = 0.0
    moved: float = 0.0
    """Bytes that must be read or written."""
    kernels: dict[tuple[str, str], str] = field(default_factory=dict)
    """(op, dtype) → the kernel that was chosen, once it is compiled."""
    asked: bool = False
    """Whether it runs only where `--variants` has its whole name, because it may never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    case: str
    variant: str
    tokens: int
    load: str
    ms: float
    tflops: float
    gb_per_s: float
    error: float
    equal: bool
    kernels: dict[str, str]


# --------------------------------------------------------------------------- inputs


def make_logits(shape: Shape, tokens: int, skew: float, device: torch.device) -> Tensor:
    """[N, E] of which the choices' largest load is `skew` times the mean, 1 for even loads."""
    generator = torch.Generator(device=device).manual_seed(0)
    noise = -torch.log(-torch.log(torch.rand(tokens, shape.experts, generator=generator, device=device) + 1e-9) + 1e-9)
    ranks = torch.log(torch.arange(1, shape.experts + 1, device=device).float())
    mean = tokens * shape.choices / shape.experts
    if skew == 1:
        # Choices of equal numbers for all: consecutive experts.
        first = torch.arange(tokens, device=device)[:, None] * shape.choices
        return (
            (torch.arange(shape.experts, device=device)[None] - first) % shape.experts < shape.choices
        ) * 4 + noise / 8
    low, high = 0.0, 8.0
    for _ in range(20):
        middle = (low + high) / 2
        chosen = (noise - middle * ranks).topk(shape.choices, dim=1).indices
        load = float(torch.bincount(chosen.flatten(), minlength=shape.experts).max()) / mean
        low, high = (middle, high) if load < skew else (low, middle)
    order = torch.randperm(shape.experts, generator=generator, device=device)
    return (noise - high * ranks)[:, order]


def setup(shape: Shape, tokens: int, skew: float, device: torch.device, dtype: torch.dtype) -> Setup:
    """Inputs of all cases."""
    torch.manual_seed(0)
    logits = make_logits(shape, tokens, skew, device).to(dtype)
    routes = references["route"].function(logits, shape.choices, True)
    return Setup(shape=shape, tokens=tokens, device=device, dtype=dtype, logits_NE=logits, routes=routes)


# --------------------------------------------------------------------------- kernels

LINEARS = ("triton-fused", "triton-adapters")
OPS = ("route", "combine", "grouped_linears", "combined_linear", "swiglu")


def has_triton() -> bool:
    """Whether Triton's programs run here."""
    return (INTERPRETED or torch.cuda.is_available()) and find_spec("triton") is not None


def table_of(variant: str, device: torch.device) -> KernelTable:
    """The kernels of a variant: torch's grouped products, and the Triton pack's with this form of the projections."""
    kernels = [grouped.kernel()]
    if variant != "reference":
        import surogate_kernels_triton

        names = ("triton", variant)
        kernels += [k for k in surogate_kernels_triton.kernels() if k.op in OPS and k.name in names]
    if device.type == "cpu":
        kernels = [replace(k, supports=lambda *_: True, takes=lambda *_: True) for k in kernels if k.op != "swiglu"]
    return KernelTable(device=device, kernels=tuple(kernels))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A function of the leaves, which may have gradients, and of fixed tensors, that calls ops."""

    function: Callable[..., Any]
    leaves: Sequence[Tensor]
    fixed: Sequence[Tensor]
    outputs: int = 1
    backward: bool = False
    flops: float = 0.0
    moved: float = 0.0

    def variants(self, names: Sequence[str] = LINEARS) -> Iterator[Variant]:
        """Compiled with each variant's kernels."""
        for name in ("reference", *(names if has_triton() else ())):
            table = table_of(name, self.leaves[0].device)
            make = partial(self.run, table)
            yield Variant(name=name, make=make, flops=self.flops, moved=self.moved, kernels=table.chosen)

    def run(self, table: KernelTable) -> Run:
        """The forward or, with `backward`, the outputs and the gradients of the leaves."""
        compiler: Compiler = "inductor" if self.leaves[0].device.type == "cuda" else "fx"
        given, function = [*self.leaves, *self.fixed], self.function
        inputs = [Signature.of(t, requires_grad=self.backward and n < len(self.leaves)) for n, t in enumerate(given)]
        with using(table):
            if not self.backward:
                forward = without_gradients(function, inputs, compiler=compiler)
                return lambda: forward(given)
            program = differentiate(function, inputs, recompute=Recompute(block=False), compiler=compiler)
        torch.manual_seed(1)
        dys = [torch.randn_like(y) for y in program.forward(given)[: self.outputs]]

        def run() -> Sequence[Tensor]:
            found = program.forward(given)
            return [*found[: self.outputs], *program.backward([*given, *found[self.outputs :], *dys])]

        return run


# --------------------------------------------------------------------------- cases


def product(s: Setup, inputs: int, outputs: int, *, transposed: bool, tiles: Sequence[str]) -> Iterator[Variant]:
    """The product of sorted rows alone."""
    weights = s.drawn(s.shape.experts, outputs, inputs, scale=inputs**-0.5)
    if transposed:
        inputs, outputs = outputs, inputs
    x, ends = s.drawn(s.rows, inputs), s.routes[4]
    view = weights.transpose(1, 2) if transposed else weights
    moved = x.nbytes + weights.nbytes + s.rows * outputs * x.itemsize
    work: dict[str, Any] = {"flops": 2.0 * s.rows * inputs * outputs, "moved": moved}
    yield Variant(name="torch", make=lambda: lambda: [grouped.torch_product(x, view, ends)], **work)
    yield Variant(name="masked", make=lambda: lambda: [grouped.masked_product(x, view, ends)], **work)
    if not has_triton():
        return
    from surogate_kernels_triton import experts_launches as launches

    def fused(tile: Any) -> Sequence[Tensor]:
        named = {"choices": 1, "scale": 0.0, "backward": transposed, "tile": tile}
        return [launches.grouped_sum([x], [weights], None, [], None, ends, s.rows, **named)]

    for name in tiles or [launches.tile_for(s.device, inputs, rank=0).name]:
        make = partial(partial, fused, launches.Tile.of(name))
        yield Variant(name=f"triton {name}", make=make, **work)


def product_fp8(s: Setup, inputs: int, outputs: int) -> Iterator[Variant]:
    """The product of recipe fp8-hybrid: of codes, with sums of both kinds, and of rows that it rounds first."""
    weights = s.drawn(s.shape.experts, outputs, inputs, scale=inputs**-0.5)
    x, ends = s.drawn(s.rows, inputs), s.routes[4]
    kept, _ = fp8_rows.packed_views(fp8_rows.pack_experts(weights), *weights.shape)
    codes = fp8_rows.quantise_rows(x)
    rounded = torch.compile(fp8_rows.quantise_rows) if s.device.type == "cuda" else fp8_rows.quantise_rows
    moved = x.numel() + weights.numel() + s.rows * outputs * 2
    work: dict[str, Any] = {"flops": 2.0 * s.rows * inputs * outputs, "moved": moved}
    yield Variant(name="torch", make=lambda: lambda: [grouped.torch_product(x, weights, ends)], **work)
    for name, fast in (("fp8 fast sums", True), ("fp8 fp32 sums", False)):
        make = partial(partial, lambda fast: [fp8_rows.native_product(*codes, *kept, ends, fast)], fast)
        yield Variant(name=name, make=make, **work)
    if has_triton() and s.device.type == "cuda":
        yield from _codes(s, x, kept, ends, work)
    with_rounding = partial(partial, lambda: [fp8_rows.native_product(*rounded(x), *kept, ends, True)])
    yield Variant(name="fp8 and rounding", make=with_rounding, **work)


CODES = ("128x256x128w8s3c", "128x128x128w4s3c", "128x128x128w8s4c", "128x256x64w8s4c", "64x256x128w4s4c")
"""Tiles of the pack's product of codes."""


def _codes(s: Setup, x: Tensor, kept: tuple[Tensor, Tensor], ends: Tensor, work: dict[str, Any]) -> Iterator[Variant]:
    """The pack's product of codes, by tile, and the rounding of its rows."""
    from surogate_kernels_triton import experts_launches as launches

    codes = launches.round_rows(x)

    def run(tile: Any) -> Sequence[Tensor]:
        named = {"choices": 1, "scale": 0.0, "backward": False, "dtype": s.dtype, "tile": tile}
        return [launches.grouped_codes([codes], [kept], None, [], None, ends, s.rows, **named)]

    for name in CODES:
        yield Variant(name=f"triton {name}", make=partial(partial, run, launches.Tile.of(name)), **work)


def rounding_fp8(s: Setup) -> Iterator[Variant]:
    """Rows to codes with a scale each, before a product of codes."""
    x = s.drawn(s.rows, s.shape.width)
    rounded = torch.compile(fp8_rows.quantise_rows) if s.device.type == "cuda" else fp8_rows.quantise_rows
    yield Variant(name="torch", make=lambda: lambda: [t.view(torch.uint8) for t in rounded(x)], moved=3.0 * x.numel())
    if has_triton() and s.device.type == "cuda":
        from surogate_kernels_triton import experts_launches as launches

        own: Callable[[], Sequence[Tensor]] = lambda: [t.view(torch.uint8) for t in launches.round_rows(x)]  # noqa: E731
        yield Variant(name="triton", make=lambda: own, moved=3.0 * x.numel())


def factors(s: Setup) -> Iterator[Variant]:
    """The gradient of trained weights."""
    dy, x, ends = s.drawn(s.rows, s.shape.inner), s.drawn(s.rows, s.shape.width), s.routes[4]
    moved = dy.nbytes + x.nbytes + s.shape.experts * s.shape.inner * s.shape.width * x.itemsize
    work: dict[str, Any] = {"flops": 2.0 * s.rows * s.shape.inner * s.shape.width, "moved": moved}
    yield Variant(name="torch", make=lambda: lambda: [grouped.torch_factors(dy, x, ends)], **work)
    yield Variant(name="masked", make=lambda: lambda: [grouped.masked_factors(dy, x, ends)], **work)
    unpadded = partial(torch._grouped_mm, dy.t(), x, offs=ends)
    yield Variant(name="unpadded", make=lambda: lambda: [unpadded()], asked=True, **work)


def route(s: Setup) -> Iterator[Variant]:
    """Choices, their order and its inverse."""
    moved = s.logits_NE.nbytes + 16.0 * s.rows
    choices = s.shape.choices
    piece = Piece(function=lambda x: ops.route(x, choices, True), leaves=[s.logits_NE], fixed=[], moved=moved)
    return piece.variants(["triton"])


def combine(s: Setup, *, backward: bool) -> Iterator[Variant]:
    """The weighted sum of a token's rows."""
    y, (weights, _, order, slot, _) = s.drawn(s.rows, s.shape.width), s.routes
    moved = y.nbytes * (4.0 if backward else 1.0) + s.tokens * s.shape.width * y.itemsize

    def function(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return ops.combine(a, first, second, b)

    piece = Piece(function=function, leaves=[y, weights], fixed=[order, slot], backward=backward, moved=moved)
    return piece.variants(["triton"])


def adapted(s: Setup, sizes: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor], ops.ExpertAdapter, float]:
    """(weights, A's and B's of projections of these (outputs, inputs), their adapter, FLOPs of a row's adapters)."""
    shape = s.shape
    weights = [s.drawn(shape.experts, o, i, scale=i**-0.5) for o, i in sizes]
    pairs = [
        t
        for o, i in sizes
        for t in (s.drawn(shape.experts, shape.rank, i, scale=i**-0.5), s.drawn(shape.experts, o, shape.rank))
    ]
    adapter = ops.ExpertAdapter(rank=shape.rank, scale=2.0, dropout=0.0, salt=0)
    return weights, pairs, adapter, 2.0 * shape.rank * sum(o + i for o, i in sizes)


def mixed(weights: Sequence[Tensor], pairs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as the ops take them."""
    return [t for i, w in enumerate(weights) for t in (w, pairs[2 * i], pairs[2 * i + 1])]


def linears(s: Setup, *, gate_up: bool, backward: bool) -> Iterator[Variant]:
    """`grouped_linears` with adapters: gate and up of gathered rows, or down of sorted ones."""
    _, _, order, slot, ends = s.routes
    inputs, outputs = (s.shape.width, s.shape.inner) if gate_up else (s.shape.inner, s.shape.width)
    count = 2 if gate_up else 1
    x = s.drawn(s.tokens if gate_up else s.rows, inputs)
    weights, pairs, adapter, extra = adapted(s, [(outputs, inputs)] * count)
    frozen, skinny = 2.0 * s.rows * inputs * outputs * count, s.rows * extra

    def function(a: Tensor, *rest: Tensor) -> Any:
        pairs, (first, second, last), weights = rest[: 2 * count], rest[2 * count : -count], rest[-count:]
        where = (first, second) if gate_up else (None, None)
        found = ops.grouped_linears(a, where[0], where[1], last, None, [adapter] * count, None, *mixed(weights, pairs))
        return tuple(found) if gate_up else found[0]

    flops = frozen + skinny + (frozen + 2 * skinny if backward else 0.0)
    fixed = [order, slot, ends, *weights]
    return Piece(
        function=function, leaves=[x, *pairs], fixed=fixed, outputs=count, backward=backward, flops=flops
    ).variants()


def combined(s: Setup, *, backward: bool) -> Iterator[Variant]:
    """`combined_linear`: down and the sum of its rows."""
    inputs, outputs = s.shape.inner, s.shape.width
    scores, _, order, slot, ends = s.routes
    (weight,), pairs, adapter, extra = adapted(s, [(outputs, inputs)])
    frozen, skinny = 2.0 * s.rows * inputs * outputs, s.rows * extra

    def function(a: Tensor, b: Tensor, *rest: Tensor) -> Tensor:
        first, second, order, slot, ends, w = rest
        return ops.combined_linear(a, order, slot, ends, b, None, adapter, None, w, first, second)

    flops = frozen + skinny + (frozen + 2 * skinny if backward else 0.0)
    leaves, fixed = [s.drawn(s.rows, inputs), scores, *pairs], [order, slot, ends, weight]
    return Piece(function=function, leaves=leaves, fixed=fixed, backward=backward, flops=flops).variants()


def layer(s: Setup) -> Iterator[Variant]:
    """A layer's feed-forward with frozen weights and adapters, forward and backward."""
    width, inner = s.shape.width, s.shape.inner
    weights, pairs, adapter, extra = adapted(s, [(inner, width), (inner, width), (width, inner)])
    frozen, skinny = 2.0 * s.rows * inner * width * 3, s.rows * extra

    def function(x: Tensor, logits: Tensor, *rest: Tensor) -> Tensor:
        tensors = mixed(rest[6:], rest[:6])
        scores, _, order, slot, ends = ops.route(logits, s.shape.choices, True)
        gate, up = ops.grouped_linears(x, order, slot, ends, None, [adapter] * 2, None, *tensors[:6])
        return ops.combined_linear(swiglu(gate, up), order, slot, ends, scores, None, adapter, None, *tensors[6:])

    leaves = [s.drawn(s.tokens, width), s.logits_NE, *pairs]
    flops = 2 * frozen + 3 * skinny
    return Piece(function=function, leaves=leaves, fixed=weights, backward=True, flops=flops).variants()


def cases(s: Setup, tiles: Sequence[str]) -> dict[str, Callable[[], Iterator[Variant]]]:
    """Name → the variants of a case."""
    width, inner = s.shape.width, s.shape.inner
    return {
        "product": partial(product, s, width, inner, transposed=False, tiles=tiles),
        "product_down": partial(product, s, inner, width, transposed=False, tiles=tiles),
        "product_dx": partial(product, s, width, inner, transposed=True, tiles=tiles),
        "product_fp8": partial(product_fp8, s, width, inner),
        "product_fp8_down": partial(product_fp8, s, inner, width),
        "rounding_fp8": partial(rounding_fp8, s),
        "factors": partial(factors, s),
        "route": partial(route, s),
        "combine": partial(combine, s, backward=False),
        "combine_full": partial(combine, s, backward=True),
        "gate_up": partial(linears, s, gate_up=True, backward=False),
        "gate_up_full": partial(linears, s, gate_up=True, backward=True),
        "down": partial(linears, s, gate_up=False, backward=False),
        "down_full": partial(linears, s, gate_up=False, backward=True),
        "combined": partial(combined, s, backward=False),
        "combined_full": partial(combined, s, backward=True),
        "layer": partial(layer, s),
    }


# --------------------------------------------------------------------------- measurement


def measure(
    case: str, variants: Iterator[Variant], s: Setup, load: str, names: Sequence[str], repeats: int
) -> list[Row]:
    """A line for each variant; one that fails is reported and left out."""
    rows: list[Row] = []
    expected: Sequence[Tensor] | None = None
    for variant in variants:
        if names and expected is not None and not any(variant.name.startswith(name) for name in names):
            continue
        if variant.asked and variant.name not in names:
            continue
        try:
            run = variant.make()
            found = [t.clone() for t in run()]
            again = run()
            equal = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
            expected = found if expected is None else expected
            ms = gpu_ms(run, repeats) if s.device.type == "cuda" else cpu_ms(run, repeats)
        except Exception as error:
            print(f"{case:18} {variant.name:22} failed: {str(error).splitlines()[0]}", flush=True)
            continue
        row = Row(
            case=case,
            variant=variant.name,
            tokens=s.tokens,
            load=load,
            ms=ms,
            tflops=variant.flops / ms / 1e9,
            gb_per_s=variant.moved / ms / 1e6,
            error=relative(found, expected),
            equal=equal,
            kernels={op: kernel for (op, _), kernel in variant.kernels.items()},
        )
        print(
            f"{case:18} {variant.name:22} {s.tokens:6} {load:5} {ms:9.3f} ms {row.tflops:7.1f} TFLOP/s "
            f"{row.gb_per_s:7.0f} GB/s  error {row.error:.1e}  equal {row.equal}"
            + ("  not chosen" if row.kernels and variant.name not in {"reference", *row.kernels.values()} else ""),
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    """Print all and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--loads", nargs="+", choices=("even", "zipf"), default=["even", "zipf"])
    parser.add_argument("--skew", type=float, default=10.0)
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--variants", nargs="+", default=[], help="beginnings of names, beside the first of each case")
    parser.add_argument(
        "--tiles", nargs="+", default=[], help="tiles of the fused product: ROWSxCOLUMNSxINNERwWARPSsSTAGES"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.small else "cuda")
    # The interpreter multiplies no matrices in bf16.
    dtype = torch.float32 if arguments.small else torch.bfloat16
    rows: list[Row] = []
    wrong = grouped.fault(device) or grouped.fault(device, factors=True)
    print(f"torch's grouped products here: {wrong or 'right'}")
    for tokens in [64] if arguments.small else arguments.tokens:
        for load in arguments.loads:
            skew = 1.0 if load == "even" else min(arguments.skew, 3.0 if arguments.small else arguments.skew)
            made = setup(SMALL if arguments.small else Shape(), tokens, skew, device, dtype)
            available = cases(made, arguments.tiles)
            if unknown := set(arguments.cases) - set(available):
                parser.error(f"unknown cases {sorted(unknown)}; there are {', '.join(available)}")
            counts = torch.diff(made.routes[4], prepend=made.routes[4].new_zeros(1)).float()
            print(
                f"{tokens} tokens, {load}: the largest expert has {float(counts.max() / counts.mean()):.1f} x the mean"
            )
            for case in arguments.cases or available:
                rows += measure(
                    case, available[case](), made, load, arguments.variants, 2 if arguments.small else arguments.repeats
                )
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
