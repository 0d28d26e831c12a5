"""Kernels of generation alone: attention over a cache in GB/s, and the choice of tokens.

    python benchmarks/decoding.py [--rows 1 16 128 256] [--contexts 512 4096 32768] [--out decoding.json]
    python benchmarks/decoding.py --cases attention --tiles 64w4s3 128w4s2 128w8s3
    python benchmarks/decoding.py --small                 # tiny, on a CPU, references alone
    TRITON_INTERPRET=1 python benchmarks/decoding.py --small    # and Triton's programs in its interpreter

`attention`: `slot_attention` with the heads of a model (`--models`). Lengths are `even`, all as long as the context, or
`mixed`, evenly spread from 1 to it. `triton` decides itself whether chunks of a row are split over programs;
`triton-split` and `triton-whole` do one of both. `choose`: `choose_tokens` for a vocabulary, half of the rows greedy.
`filters`: the same with top-k and top-p, in each way that generation knows; `mass` ignores top-k.

A time is the median of replays of a CUDA graph with a cold L2 cache. GB/s: the keys, values or logits
that must be read. `error`: against the first variant of the case, relative. `equal`: whether two runs give equal bits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from replays import Run, cpu_ms, gpu_ms, relative
from torch import Tensor

from surogate_core.bundles import Sampling
from surogate_core.generate.sampling import Rows, choose
from surogate_core.kernels import decoding as ops
from surogate_core.kernels.registry import KernelTable, using

HEADS = {"0.6b": (16, 8, 128), "8b": (32, 8, 128), "1b": (32, 8, 64), "small": (4, 2, 16)}
"""Name of a model → query heads, key heads, features: Qwen3-0.6B, Qwen3-8B, Llama-3.2-1B."""
VOCABULARIES = {"0.6b": 151936, "8b": 151936, "1b": 128256, "small": 500}
CASES = ("attention", "choose", "filters")
MOST_BYTES = 1 << 30
"""Largest cache for which the reference runs, which copies it in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to compute a case."""

    name: str
    run: Run
    patches: Mapping[str, Any]
    """Names of the Triton pack's module → what they are while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    case: str
    variant: str
    model: str
    rows: int
    context: int
    lengths: str
    us: float
    gb_per_s: float
    error: float
    equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Inputs of one size."""

    name: str
    model: str
    rows: int
    context: int = 0
    lengths: str = ""
    moved: int
    """Bytes that must be read."""
    variants: Callable[[], Iterator[Variant]]


def has_triton(device: torch.device) -> bool:
    """Whether Triton's programs run on the device."""
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return device.type == "cuda" or bool(knobs.runtime.interpret)


def attention(
    model: str, rows: int, context: int, lengths: str, device: torch.device, dtype: torch.dtype, tiles: Sequence[str]
) -> Case:
    """`slot_attention` with random keys and values."""
    heads, kv_heads, features = HEADS[model]
    count = torch.full((rows,), context) if lengths == "even" else torch.linspace(1, context, rows).long()
    itemsize = dtype.itemsize * kv_heads * features * 2

    def variants() -> Iterator[Variant]:
        torch.manual_seed(0)
        drawn = partial(torch.randn, device=device, dtype=dtype)
        q, k, v = (drawn(rows, h, features) for h in (heads, kv_heads, kv_heads))
        keys, values = (drawn(rows + 1, context, kv_heads, features) for _ in range(2))
        places = torch.randperm(rows).to(device), (count - 1).to(device)

        def call(function: Any) -> Sequence[Tensor]:
            return [function(q, k, v, keys, values, *places, context, features**-0.5)]

        if keys.nbytes + values.nbytes <= MOST_BYTES:
            yield Variant(name="reference", run=partial(call, ops.slot_attention), patches={})
        if not has_triton(device):
            return
        from surogate_kernels_triton import decoding

        run = partial(call, decoding.slot_attention)
        yield Variant(name="triton", run=run, patches={})
        for name, split in (("split", True), ("whole", False)):
            yield Variant(name=f"triton-{name}", run=run, patches={"splits": lambda *some, split=split: split})
        for name in tiles:
            t, warps, stages = map(int, re.split("[ws]", name))
            tile = decoding.Tile(t=t, warps=warps, stages=stages)
            yield Variant(name=f"triton {name}", run=run, patches={"tile_for": lambda *some, tile=tile: tile})

    return Case(
        name="attention",
        model=model,
        rows=rows,
        context=context,
        lengths=lengths,
        moved=int(count.sum()) * itemsize,
        variants=variants,
    )


def choice(model: str, rows: int, device: torch.device, dtype: torch.dtype) -> Case:
    """`choose_tokens` with random logits."""
    vocabulary = VOCABULARIES[model]

    def variants() -> Iterator[Variant]:
        torch.manual_seed(0)
        logits = torch.randn(rows, vocabulary, device=device, dtype=dtype) * 3
        temperature = (torch.arange(rows, device=device) % 2).float()
        keys = torch.randint(-(2**31), 2**31, (rows, 2)).int().to(device)
        numbers = torch.arange(rows, device=device).int()

        def call(function: Any) -> Sequence[Tensor]:
            return list(function(logits, temperature, keys, numbers))

        yield Variant(name="reference", run=partial(call, ops.choose_tokens), patches={})
        if has_triton(device):
            from surogate_kernels_triton import sampling

            yield Variant(name="triton", run=partial(call, sampling.choose_tokens), patches={})

    moved = rows * vocabulary * dtype.itemsize
    return Case(name="choose", model=model, rows=rows, moved=moved, variants=variants)


def filters(model: str, rows: int, device: torch.device, dtype: torch.dtype) -> Case:
    """Sampling with top-k 20 and top-p 0.95 by `generate.sampling.choose`."""
    vocabulary = VOCABULARIES[model]

    def variants() -> Iterator[Variant]:
        torch.manual_seed(0)
        logits = torch.randn(rows, vocabulary, device=device, dtype=dtype) * 3
        some = [Sampling(top_k=20, top_p=0.95)] * rows
        chosen = Rows.of(some, [(n, n + 1) for n in range(rows)], range(rows), device)

        def call(kernels: KernelTable) -> Sequence[Tensor]:
            with using(kernels):
                return list(choose(logits, chosen))

        yield Variant(name="reference", run=partial(call, KernelTable(device=device)), patches={})
        if has_triton(device):
            from surogate_kernels_triton import sampling

            kernels = tuple(replace(k, supports=lambda device, dtype: True) for k in sampling.kernels())
            yield Variant(name="triton", run=partial(call, KernelTable(device=device, kernels=kernels)), patches={})

    return Case(name="filters", model=model, rows=rows, moved=rows * vocabulary * dtype.itemsize, variants=variants)


def measure(case: Case, device: torch.device, names: Sequence[str], repeats: int) -> Iterator[Row]:
    """The lines of a case, of the first variant and those with these beginnings."""
    expected: list[Tensor] = []
    for variant in case.variants():
        if expected and names and not variant.name.startswith(tuple(names)):
            continue
        with ExitStack() as stack:
            for name, value in variant.patches.items():
                stack.enter_context(patch(f"surogate_kernels_triton.decoding.{name}", value))
            found, again = ([t.clone() for t in variant.run()] for _ in range(2))
            ms = gpu_ms(variant.run, repeats) if device.type == "cuda" else cpu_ms(variant.run, repeats)
        expected = expected or found
        yield Row(
            case=case.name,
            variant=variant.name,
            model=case.model,
            rows=case.rows,
            context=case.context,
            lengths=case.lengths,
            us=ms * 1e3,
            gb_per_s=case.moved / ms / 1e6,
            error=relative(found, expected),
            equal=all(map(torch.equal, found, again)),
        )


def cases(arguments: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """Those that the command line asks for."""
    # The interpreter multiplies no matrices in bf16.
    dtype = torch.float32 if arguments.small else torch.bfloat16
    for model in ["small"] if arguments.small else arguments.models:
        for rows in [3] if arguments.small else arguments.rows:
            if "attention" in arguments.cases:
                for context in [300] if arguments.small else arguments.contexts:
                    for lengths in ("even", "mixed"):
                        nbytes = rows * context * HEADS[model][1] * HEADS[model][2] * 2 * dtype.itemsize
                        if nbytes <= arguments.most_gib * 2**30:
                            yield attention(model, rows, context, lengths, device, dtype, arguments.tiles)
            if "choose" in arguments.cases:
                yield choice(model, rows, device, dtype)
            if "filters" in arguments.cases:
                yield filters(model, rows, device, dtype)


def main() -> None:
    """Print all and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--models", nargs="+", choices=sorted(HEADS), default=["0.6b", "8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 128, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 32768])
    parser.add_argument("--variants", nargs="+", default=[], help="beginnings of names, beside the first of each case")
    parser.add_argument("--tiles", nargs="+", default=[], help="POSITIONSwWARPSsSTAGES")
    parser.add_argument("--most-gib", type=float, default=16.0, help="leave out larger caches")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.small else "cuda")
    found: list[Row] = []
    for case in cases(arguments, device):
        for row in measure(case, device, arguments.variants, 2 if arguments.small else arguments.repeats):
            print(
                f"{row.case:10} {row.variant:14} {row.model:6} {row.rows:4} rows {row.context:6} {row.lengths:6} "
                f"{row.us:9.1f} us {row.gb_per_s:7.0f} GB/s  error {row.error:.1e}  equal {row.equal}",
                flush=True,
            )
            found.append(row)
            # After each case, so that a run that is cut short leaves what it has measured.
            if arguments.out:
                arguments.out.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
