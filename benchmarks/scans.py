"""Scans alone, forward and backward: Mamba-2's and the gated delta rule, by every kernel and by other libraries.

    python benchmarks/scans.py [--json scans.json]            # about two minutes on an H200, compilers included
    python benchmarks/scans.py --cases qwen3.5-9b --rows 16384 --packs triton fla
    python benchmarks/scans.py --packs triton --tiles 64:keys=64w8s1 128:local=64w4s2
    python benchmarks/scans.py --sweep [--cases ...] [--tiles 64:values=32w8s1 ...]
    python benchmarks/scans.py --tiny --device cpu

A case has the heads of a model (CASES) and `--tokens` tokens in documents of one length (`--rows`), bf16, with decays
and steps in fp32. `GB/s` is what a pass must read and write (inputs, outputs and gradients once), `TFLOP/s` the
products in chunks of 64 rows; a backward computes the forward again and has two products for each of its products.
Times are medians of replays of a CUDA graph with a cold L2 cache; a backward's is that of both less the forward's.
`error`: results and gradients against the reference in float64 on one head of keys and CHECKED tokens, relative.
`equal`: whether two runs give equal bits.

`fla` (flash-linear-attention) and `mamba` (mamba_ssm) are measured where they can be imported; mamba's time includes a
scaling of x. fla's gated backward is wrong with Triton 3.4 to 3.7.0 on Hopper: read its error before its time.

A tile is ``CHUNK:program=FEATURESwWARPSsSTAGES`` for the programs system, local, carried, values or keys of the Triton
pack; ``e32`` behind it has programs of `keys` with 32 features of a key instead of 64. `--sweep` times a forward and a
backward with each of the tiles, those of `--tiles` or of SWEPT, one by one.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from replays import cpu_ms, gpu_ms, relative
from torch import Tensor

from surogate_core.kernels import scans

CHECKED = 512
"""Tokens that are compared with the reference in float64."""
PACKS = ("triton", "reference", "fla", "mamba")
SWEPT = (
    *(f"64:system={tile}" for tile in ("32w4s1", "128w4s1")),
    *(f"64:local={tile}" for tile in ("64w4s1", "128w4s1")),
    *(f"64:carried={tile}" for tile in ("16w4s3", "32w4s2", "32w4s3", "64w4s3")),
    *(f"64:values={tile}" for tile in ("32w4s1", "64w4s2")),
    *(f"64:keys={tile}" for tile in ("64w4s2", "64w4s1e32", "32w4s1", "128w4s1e32")),
)
"""Tiles that a sweep tries. Another chunk is that of all programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The scan of a model."""

    delta: bool
    groups: int
    heads: int
    keys: int
    values: int


CASES = {
    "nemotron-9b-v2": Shape(delta=False, groups=8, heads=128, keys=128, values=80),
    "nemotron-3-30b": Shape(delta=False, groups=8, heads=64, keys=128, values=64),
    "qwen3.5-9b": Shape(delta=True, groups=16, heads=32, keys=128, values=128),
    "qwen3.5-2b": Shape(delta=True, groups=16, heads=16, keys=128, values=128),
    "tiny-ssd": Shape(delta=False, groups=2, heads=4, keys=16, values=16),
    "tiny-delta": Shape(delta=True, groups=2, heads=4, keys=16, values=16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    pack: str
    case: str
    row: int
    tiles: str
    forward_ms: float
    backward_ms: float
    forward_gbs: float
    backward_gbs: float
    forward_tflops: float
    backward_tflops: float
    error: float
    equal: bool


class Inputs:
    """Random rows of a case in documents of one length."""

    def __init__(self, shape: Shape, tokens: int, row: int, device: torch.device, dtype: torch.dtype):
        generator = torch.Generator(device).manual_seed(0)
        drawn = partial(torch.randn, generator=generator, device=device)
        self.shape, self.tokens, self.row = shape, tokens, row
        q, k = (torch.nn.functional.normalize(drawn(tokens, shape.groups, shape.keys), dim=-1) for _ in range(2))
        v, dy = (drawn(tokens, shape.heads, shape.values) for _ in range(2))
        rate = drawn(tokens, shape.heads).sigmoid()
        decay = -rate * torch.linspace(0.01, 2.0, shape.heads, device=device)
        self.leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        self.leaves += [t.requires_grad_() for t in (decay, rate)]
        self.dy = dy.to(dtype)
        self.borders = torch.arange(0, tokens + 1, row, dtype=torch.int32, device=device)

    def wide(self) -> Inputs:
        """The same in float64."""
        other = object.__new__(Inputs)
        other.__dict__ |= self.__dict__
        other.leaves = [t.detach().double().requires_grad_() for t in self.leaves]
        other.dy = self.dy.double()
        return other

    def arguments(self) -> tuple[Tensor, ...]:
        """The positional arguments of the op."""
        q, k, v, decay, rate = self.leaves
        return (q, k, v, decay, rate, self.borders) if self.shape.delta else (v, k, q, decay, rate, self.borders)

    def bytes(self) -> tuple[int, int]:
        """(of a forward, of a backward): every tensor once."""
        read = sum(t.numel() * t.element_size() for t in self.leaves)
        y = self.dy.numel() * self.dy.element_size()
        return read + y, 2 * read + y

    def flops(self) -> int:
        """The FLOPs of a forward in chunks of 64 rows."""
        keys, values, chunk = self.shape.keys, self.shape.values, 64
        found = chunk * (keys + values) + 2 * keys * values
        if self.shape.delta:
            found += chunk * (2 * keys + values + chunk) + keys * values
        return 2 * found * self.tokens * self.shape.heads

    def through_fla(self) -> Tensor:
        """The output of flash-linear-attention."""
        q, k, v, decay, rate = (t[None] for t in self.leaves)
        shared = self.shape.heads // self.shape.groups
        q, k = (t.repeat_interleave(shared, dim=2) for t in (q, k))
        function = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        y: Tensor = function(q, k, v, g=decay, beta=rate, scale=1.0, cu_seqlens=self.borders.long())[0]
        return y[0]

    def through_mamba(self) -> Tensor:
        """The output of mamba_ssm, whose decay is dt · A: here with A = -1 and dt the decay, and x scaled to match."""
        q, k, v, decay, rate = self.leaves
        function = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        ones = torch.full((self.shape.heads,), -1.0, device=v.device)
        x = (v * (rate / -decay)[..., None]).to(v.dtype)
        places = torch.arange(self.tokens, device=v.device, dtype=torch.int32)[None] // self.row
        y: Tensor = function(x[None], -decay[None], ones, k[None], q[None], 256, seq_idx=places)
        return y[0]


def implementation(pack: str, inputs: Inputs, device: torch.device) -> Callable[[], Tensor] | None:
    """What a pack calls for a case; None if it has nothing for it."""
    name = "gated_delta" if inputs.shape.delta else "ssd"
    if pack == "fla":
        found = inputs.shape.delta and device.type == "cuda" and find_spec("fla") is not None
        return inputs.through_fla if found else None
    if pack == "mamba":
        found = not inputs.shape.delta and device.type == "cuda" and find_spec("mamba_ssm") is not None
        return inputs.through_mamba if found else None
    if pack == "reference":
        return lambda: getattr(scans, name)(*inputs.arguments())[0]
    if find_spec("triton") is None or (device.type == "cpu" and not interpreted()):
        return None
    op = getattr(import_module("surogate_kernels_triton.scans"), name)
    return lambda: op(*inputs.arguments())[0]


def interpreted() -> bool:
    """Whether Triton interprets its programs."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def both(call: Callable[[], Tensor], inputs: Inputs) -> list[Tensor]:
    """The output and the gradients."""
    y = call()
    return [y.detach(), *torch.autograd.grad(y, inputs.leaves, inputs.dy)]


def error_of(pack: str, shape: Shape, row: int, device: torch.device, dtype: torch.dtype) -> float:
    """The relative error with one head of keys, in float64 on the CPU."""
    small = replace(shape, groups=1, heads=shape.heads // shape.groups)
    row = min(row, CHECKED)
    inputs = Inputs(small, row * max(1, CHECKED // row), row, device, dtype)
    call = implementation(pack, inputs, device)
    assert call is not None
    exact = inputs.wide()
    op = scans.gated_delta if shape.delta else scans.ssd
    return relative(both(call, inputs), both(lambda: op(*exact.arguments())[0], exact))


def measured(pack: str, name: str, row: int, args: argparse.Namespace, tiles: str = "") -> Row | None:
    """The line of a pack and a case; None if it has no kernel for it."""
    device, shape = torch.device(args.device), CASES[name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = Inputs(shape, args.tokens, row, device, dtype)
    call = implementation(pack, inputs, device)
    if call is None:
        return None
    error = error_of(pack, shape, row, device, dtype)
    first, second = both(call, inputs), both(call, inputs)
    equal = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del first, second
    timed = gpu_ms if device.type == "cuda" else cpu_ms

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [call()]

    forward_ms = timed(forward, args.repeats)
    backward_ms = max(timed(lambda: both(call, inputs), args.repeats) - forward_ms, 1e-6)
    (read, written), flops = inputs.bytes(), inputs.flops()
    return Row(
        pack=pack,
        case=name,
        row=row,
        tiles=tiles,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        forward_gbs=read / forward_ms / 1e6,
        backward_gbs=written / backward_ms / 1e6,
        forward_tflops=flops / forward_ms / 1e9,
        backward_tflops=3 * flops / backward_ms / 1e9,
        error=error,
        equal=equal,
    )


def patches(settings: Sequence[str]) -> ExitStack:
    """The Triton pack takes tiles such as ``64:keys=64w8s1``."""
    stack = ExitStack()
    if not settings or find_spec("triton") is None:
        return stack
    pack = import_module("surogate_kernels_triton.scans")
    found: dict[str, Any] = {}
    for setting in settings:
        parts = re.fullmatch(r"(\d+):(\w+)=(\d+)w(\d+)s(\d+)(?:e(\d+))?", setting)
        if parts is None:
            raise SystemExit(f"--tiles: {setting} is not like 64:keys=64w8s1")
        numbers = zip(("f", "warps", "stages", "e"), parts.groups()[2:], strict=True)
        tile = pack.ScanTile(**{name: int(number) for name, number in numbers if number is not None})
        found |= {"chunk": int(parts[1]), parts[2]: tile}
    before = pack.tiles_for
    stack.enter_context(patch.object(pack, "tiles_for", lambda *args: replace(before(*args), **found)))
    return stack


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Every case by every pack, or by the Triton pack with each of its tiles."""
    for name, row in product(args.cases, args.rows):
        for pack, tiles in product(["triton"], ["", *args.tiles]) if args.sweep else product(args.packs, [""]):
            if ":system=" in tiles and not CASES[name].delta:
                continue
            with patches([tiles] if tiles else [] if args.sweep else args.tiles):
                try:
                    found = measured(pack, name, row, args, tiles)
                except torch.AcceleratorError as error:
                    raise SystemExit(f"{pack} {name} {row} {tiles}: {error}") from None  # the context is lost
                except Exception as error:  # of a compiler, or of another library
                    message = (str(error).splitlines() or [type(error).__name__])[0]
                    print(f"{pack:9} {name:15} {row:6} {tiles:20}: {message[:100]}", flush=True)
                    continue
            if found is not None:
                yield found


def show(row: Row) -> None:
    """A line of the table."""
    print(
        f"{row.pack:9} {row.case:15} {row.row:6} {row.forward_ms:9.3f} {row.backward_ms:9.3f} {row.forward_gbs:8.0f} "
        f"{row.backward_gbs:8.0f} {row.forward_tflops:8.1f} {row.backward_tflops:8.1f} {row.error:8.1e} "
        f"{'yes' if row.equal else 'NO':5} {row.tiles}",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in CASES if not name.startswith("tiny")]
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=usual)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--packs", nargs="+", choices=PACKS, default=PACKS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiles", nargs="+", default=[], help="the Triton pack's, e.g. 64:keys=64w8s1")
    parser.add_argument("--sweep", action="store_true", help="time the Triton pack with each of --tiles")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few small cases, to try the script")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.cases, args.rows, args.tokens, args.repeats = ["tiny-ssd", "tiny-delta"], [16, 64], 64, 2
    if args.sweep:
        args.tiles = args.tiles or list(SWEPT)
    return args


def main() -> None:
    """Measure and write what was found."""
    args, begun, device = parsed(), time.perf_counter(), None
    print("pack      case               row  forward   backward     GB/s  backw.   TFLOP/s backw.    error equal tiles")
    found = []
    for row in rows(args):
        show(row)
        found.append(asdict(row))
    print(f"{time.perf_counter() - begun:.0f} s")
    if args.json is not None:
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        about = {"device": device, "torch": torch.__version__, "tokens": args.tokens, "tiles": args.tiles}
        args.json.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
