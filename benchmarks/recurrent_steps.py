"""Decoding steps of recurrences alone: a scan's and the convolution's before it, on states in slots, in GB/s.

    python benchmarks/recurrent_steps.py [--cases nemotron-9b-v2 qwen3.5-9b] [--rows 16 128] [--out steps.json]
    python benchmarks/recurrent_steps.py --packs triton --tiles 32w4 16w1 16w4 64w8     # features of a value, warps
    python benchmarks/recurrent_steps.py --small             # tiny, on a CPU, references alone

A case has the heads of a model (`scans.CASES`); rows are bf16 with decays and rates in fp32, one row in each slot. A
time is the median of replays of a CUDA graph with a cold L2 cache. GB/s: each state read and written once. `error`: y
and the states after two steps against the reference in float64 with four rows, relative. `equal`: whether two runs give
equal bits.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
from replays import cpu_ms, gpu_ms, relative
from scans import CASES, Shape
from torch import Tensor

from surogate_core.kernels import convolutions, scans

CHECKED = 4
"""Rows that are compared with the reference in float64."""
WIDTH = 4
"""Inputs of an output of the convolution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A line of the table."""

    pack: str
    case: str
    op: str
    rows: int
    tile: str
    us: float
    gb_per_s: float
    error: float
    equal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The arguments of a step; the last slot takes rows that do not count, of which there are none."""

    rows: list[Tensor]
    states: Tensor
    slots: Tensor
    weights: list[Tensor]

    def arguments(self) -> list[Tensor]:
        """With states of their own."""
        return [*self.rows, self.states.clone(), self.slots, *self.weights]

    def wide(self) -> StepInputs:
        """The same in float64."""
        rows, weights = ([t.double() for t in tensors] for tensors in (self.rows, self.weights))
        return StepInputs(rows=rows, states=self.states.double(), slots=self.slots, weights=weights)


def inputs_of(shape: Shape, op: str, rows: int, device: torch.device, dtype: torch.dtype) -> StepInputs:
    """Random ones."""
    drawn = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(device)
    if op == "causal_convolution_step":
        channels = 2 * shape.groups * shape.keys + shape.heads * shape.values
        made, weights = [drawn(rows, channels).to(dtype)], [drawn(channels, WIDTH).to(dtype)]
        states = drawn(rows + 1, WIDTH - 1, channels)
    else:
        q, k = (torch.nn.functional.normalize(drawn(rows, shape.groups, shape.keys), dim=-1) for _ in range(2))
        v, rate = drawn(rows, shape.heads, shape.values), drawn(rows, shape.heads).sigmoid()
        made = [t.to(dtype) for t in ((q, k, v) if shape.delta else (v, k, q))]
        made, weights = [*made, -rate * torch.linspace(0.01, 2.0, shape.heads, device=device), rate], []
        states = drawn(rows + 1, shape.heads, shape.keys, shape.values)
    states[-1] = 0
    return StepInputs(rows=made, states=states, slots=slots, weights=weights)


def function_of(pack: str, op: str) -> Callable[..., Tensor] | None:
    """What a pack calls; None if it cannot."""
    if pack == "reference":
        found: Callable[..., Tensor] = getattr(convolutions if op.startswith("causal") else scans, op)
        return found
    return getattr(import_module("surogate_kernels_triton.steps"), op) if find_spec("triton") else None


def two_steps(function: Callable[..., Tensor], inputs: StepInputs) -> list[Tensor]:
    """y of the second of two steps, and the states behind it."""
    given = inputs.arguments()
    function(*given)
    return [function(*given), given[len(inputs.rows)]]


def measured(pack: str, name: str, op: str, rows: int, tile: str, args: argparse.Namespace) -> StepRow | None:
    """The line of a pack and a case; None if it has no kernel for it."""
    device, function = torch.device(args.device), function_of(pack, op)
    if function is None:
        return None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    few = inputs_of(CASES[name], op, CHECKED, device, dtype)
    exact = function_of("reference", op)
    assert exact is not None
    inputs = inputs_of(CASES[name], op, rows, device, dtype)
    first, second = two_steps(function, inputs), two_steps(function, inputs)
    given = inputs.arguments()
    timed = gpu_ms if device.type == "cuda" else cpu_ms
    milliseconds = timed(lambda: [function(*given)], args.repeats)
    return StepRow(
        pack=pack,
        case=name,
        op=op,
        rows=rows,
        tile=tile,
        us=milliseconds * 1e3,
        gb_per_s=2 * inputs.states[:-1].nbytes / milliseconds / 1e6,
        error=relative(two_steps(function, few), two_steps(exact, few.wide())),
        equal=all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
    )


def with_tile(tile: str) -> ExitStack:
    """The Triton pack has a tile such as ``32w4``; its own without one."""
    stack = ExitStack()
    if tile:
        parts = re.fullmatch(r"(\d+)w(\d+)", tile)
        if parts is None:
            raise SystemExit(f"--tiles: {tile} is not like 32w4")
        pack = import_module("surogate_kernels_triton.steps")
        stack.enter_context(patch.object(pack, "TILE", pack.StepTile(f=int(parts[1]), warps=int(parts[2]))))
    return stack


def lines(args: argparse.Namespace) -> Iterator[StepRow]:
    """Every case by every pack; scans by the Triton pack with each tile."""
    for name, rows, pack in product(args.cases, args.rows, args.packs):
        scan = "gated_delta_step" if CASES[name].delta else "ssd_step"
        tiles = ["", *args.tiles] if pack == "triton" and find_spec("triton") else [""]
        for op, tile in [*((scan, tile) for tile in tiles), ("causal_convolution_step", "")]:
            with with_tile(tile):
                found = measured(pack, name, op, rows, tile, args)
            if found is not None:
                yield found


def main() -> None:
    """Measure and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["nemotron-9b-v2", "qwen3.5-9b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--packs", nargs="+", choices=("triton", "reference"), default=["triton", "reference"])
    parser.add_argument("--tiles", nargs="+", default=[], help="further tiles of the Triton pack, e.g. 16w1")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.small:
        args.cases, args.rows, args.packs = ["tiny-ssd", "tiny-delta"], [3], ["reference"]
        args.repeats, args.device = 2, "cpu"
    found = []
    for row in lines(args):
        found.append(asdict(row))
        what = f"{row.pack:9} {row.case:15} {row.op:24} {row.rows:4} rows {row.tile:6}"
        bits = "equal" if row.equal else "NOT EQUAL"
        print(f"{what} {row.us:9.1f} us {row.gb_per_s:8.0f} GB/s  error {row.error:.1e}  {bits}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
