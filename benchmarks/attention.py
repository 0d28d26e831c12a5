"""Attention alone in TFLOP/s, forward and backward: every kernel pack by name, beside torch's cuDNN and flash kernels.

    python benchmarks/attention.py [--json attention.json]        # about a minute on an H200, compilers included
    python benchmarks/attention.py --features 256 --rows 16384 --windows 0 1024
    python benchmarks/attention.py --features 256 --packs triton --tiles forward=128x64w8s2 queries=64x64w4s2
    python benchmarks/attention.py --sweep --features 256 --rows 16384 --windows 0 1024 [--tiles forward=64x64w4s3 ...]
    python benchmarks/attention.py --tiny --device cpu

A case has `--tokens` tokens in documents of one length (`--rows`), bf16, and the heads of HEADS, so that all head sizes
have equal FLOPs. FLOPs are those of the visible pairs of a query and a key: causal, in the document, in the window; a
backward has 2.5 times those of a forward. torch's kernels know neither windows nor sinks, so they run the plain cases.
`vs plain`: the time of a case with a window or sinks over what its visible FLOPs take at the plain case's rate.

Times are medians of replays of a CUDA graph with a cold L2 cache; a backward's is that of both less the forward's.
`error`: the output and the gradients against the reference in fp32 on the first 1024 tokens, relative. `equal`: whether
two runs give equal bits. Triton's programs are compiled first, by several processes (`--jobs`).

`--sweep` times each of Triton's programs alone with other tiles, those of `--tiles` or of SWEPT.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
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
from replays import Run, cpu_ms, gpu_ms, relative
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from surogate_core.bundles import Kernel
from surogate_core.kernels import ops
from surogate_core.kernels.torch_pack import TORCH_PACK

HEADS = {16: (4, 2), 64: (64, 8), 128: (32, 8), 256: (16, 8), 512: (8, 4)}
"""Features of a head → heads of queries, heads of keys."""
PACKS = ("hopper", "triton", "torch", "cudnn", "flash")
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
CHECKED = 1024
"""Tokens that are compared with the reference, which forms the scores of all pairs."""


SWEPT = (
    *(f"forward={t}" for t in ("128x64w8s2", "128x64w8s3", "128x128w8s2", "64x64w4s2", "64x64w4s3", "64x128w4s2")),
    *(f"queries={t}" for t in ("128x64w8s2", "128x32w8s2", "64x64w4s2", "64x64w8s2", "64x64w4s3", "64x32w4s3")),
    *(f"keys={t}" for t in ("64x128w8s2", "32x128w8s2", "64x64w8s2", "64x64w4s2", "32x64w8s2", "32x64w4s3")),
)
"""Tiles that a sweep tries."""

noticed: set[str] = set()
"""Packs that cannot run, which was printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An attention."""

    features: int
    row: int
    """Tokens of a document."""
    window: int
    sinks: bool

    def pairs(self, tokens: int) -> int:
        """Visible pairs of a query and a key, of one head."""
        size = min(self.window or self.row, self.row)
        return tokens // self.row * (size * (size + 1) // 2 + (self.row - size) * size)

    def named(self, sinks: Tensor) -> dict[str, Any]:
        """The extensions of a call."""
        return ({"window": self.window} if self.window else {}) | ({"sinks": sinks} if self.sinks else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    pack: str
    features: int
    row: int
    window: int
    sinks: bool
    forward_ms: float
    backward_ms: float
    forward_tflops: float
    backward_tflops: float
    error: float
    equal: bool


class Inputs:
    """Random tensors of a case."""

    def __init__(self, case: Case, tokens: int, device: torch.device, dtype: torch.dtype):
        generator = torch.Generator(device).manual_seed(0)
        heads, kv_heads = HEADS[case.features]
        drawn = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        self.case, self.tokens = case, tokens
        self.q, self.k, self.v = (drawn(tokens, h, case.features).requires_grad_() for h in (heads, kv_heads, kv_heads))
        self.dy, self.sinks = drawn(tokens, heads, case.features), drawn(heads).requires_grad_()
        self.borders = torch.arange(0, tokens + 1, case.row, dtype=torch.int32, device=device)
        self.scale = case.features**-0.5

    def leaves(self) -> list[Tensor]:
        """What is differentiated."""
        return [self.q, self.k, self.v, *([self.sinks] if self.case.sinks else [])]

    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments of the op."""
        return self.q, self.k, self.v, self.borders, self.case.row, self.scale

    def through_op(self, op: Callable[..., Tensor]) -> Tensor:
        """The output of an implementation of `ops.attention`."""
        return op(*self.arguments(), **self.case.named(self.sinks))

    def through_sdpa(self, backend: SDPBackend) -> Tensor:
        """The output of a kernel of torch, document by document in a batch."""
        batch = (self.tokens // self.case.row, self.case.row)
        q, k, v = (t.unflatten(0, batch).transpose(1, 2) for t in (self.q, self.k, self.v))
        with sdpa_kernel(backend):
            y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        return y.transpose(1, 2).flatten(0, 1)


def kernels_of(pack: str, device: torch.device) -> Sequence[Kernel]:
    """The kernels of attention of an installed pack."""
    if pack == "torch":
        return [k for k in TORCH_PACK.kernels() if k.op == "attention" and k.supports(device, torch.bfloat16)][:1]
    module = f"surogate_kernels_{pack}"
    if find_spec(module) is None:
        return []
    plugin = import_module(module)
    if pack == "triton" and interpreted():
        return [import_module("surogate_kernels_triton.attention").kernel()]
    if (reason := plugin.unavailable(device)) is not None:
        if pack not in noticed:
            print(f"{pack}: {reason}", flush=True)
            noticed.add(pack)
        return []
    return [k for k in plugin.kernels() if k.op == "attention"]


def interpreted() -> bool:
    """Whether Triton interprets its programs."""
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def implementation(pack: str, inputs: Inputs, device: torch.device) -> Callable[[], Tensor] | None:
    """What a pack calls for a case; None if it has nothing for it."""
    named = inputs.case.named(inputs.sinks)
    if pack in SDPA:
        return None if named or device.type == "cpu" else partial(inputs.through_sdpa, SDPA[pack])
    for kernel in kernels_of(pack, device):
        if named.keys() <= kernel.knows and kernel.takes(*inputs.arguments(), **named):
            return partial(inputs.through_op, kernel.function)
    return None


def both(call: Callable[[], Tensor], inputs: Inputs) -> list[Tensor]:
    """The output and the gradients."""
    y = call()
    return [y.detach(), *torch.autograd.grad(y, inputs.leaves(), inputs.dy)]


def error_of(pack: str, case: Case, device: torch.device, dtype: torch.dtype) -> float:
    """The relative error in documents of at most CHECKED tokens."""
    short = Case(features=case.features, row=min(case.row, CHECKED), window=case.window, sinks=case.sinks)
    inputs = Inputs(short, short.row, device, dtype)
    call = implementation(pack, inputs, device)
    assert call is not None
    found = both(call, inputs)
    exact = Inputs(short, short.row, device, dtype)
    for name in ("q", "k", "v", "dy", "sinks"):
        wide = getattr(inputs, name).detach().float()
        setattr(exact, name, wide if name == "dy" else wide.requires_grad_())
    return relative(found, both(lambda: exact.through_op(ops.attention), exact))


def measured(pack: str, case: Case, tokens: int, device: torch.device, repeats: int) -> Row | None:
    """The line of a pack and a case; None if it has no kernel for it."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32 if not interpreted() else torch.float16
    inputs = Inputs(case, tokens, device, dtype)
    call = implementation(pack, inputs, device)
    if call is None:
        return None
    error = error_of(pack, case, device, dtype)
    first, second = both(call, inputs), both(call, inputs)
    equal = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del first, second
    timed = gpu_ms if device.type == "cuda" else cpu_ms

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [call()]

    forward_ms = timed(forward, repeats)
    backward_ms = timed(lambda: both(call, inputs), repeats) - forward_ms
    flops = 4 * case.pairs(tokens) * HEADS[case.features][0] * case.features
    return Row(
        pack=pack,
        **asdict(case),
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        forward_tflops=flops / forward_ms / 1e9,
        backward_tflops=2.5 * flops / max(backward_ms, 1e-6) / 1e9,
        error=error,
        equal=equal,
    )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every head size and row: plain first, then windows that are shorter than the row, then sinks."""
    for features, row in product(args.features, args.rows):
        windows = [w for w in args.windows if w < row]
        for window in windows:
            yield Case(features=features, row=row, window=window, sinks=False)
        if args.sinks:
            for window in windows[:1] + [w for w in windows if w == 1024]:
                yield Case(features=features, row=row, window=window, sinks=True)


def compile_ahead(args: argparse.Namespace) -> None:
    """Let processes run each program of Triton's once: afterwards they are in Triton's cache."""
    found = sorted({(c.features, 64 if c.window else 0, int(c.sinks)) for c in cases(args)})
    waiting = [[*map(str, one)] for one in found]
    if args.sweep:
        waiting = [[*one, "--sweep", "--tiles", tile] for one in waiting for tile in args.tiles]
    elif args.tiles:
        waiting = [[*one, "--tiles", *args.tiles] for one in waiting]
    running: list[subprocess.Popen[bytes]] = []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            command = [sys.executable, __file__, "--compile", *waiting.pop()]
            # What cannot be compiled fails again, and is reported, where it is measured.
            running.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.1)


def compile_one(swept: str, features: int, window: int, sinks: int) -> None:
    """Run the Triton pack's programs of a case once, or the one with a name."""
    case = Case(features=features, row=256, window=window, sinks=bool(sinks))
    inputs = Inputs(case, 16384, torch.device("cuda"), torch.bfloat16)
    if swept:
        programs_of(inputs)[swept]()
    elif (call := implementation("triton", inputs, torch.device("cuda"))) is not None:
        both(call, inputs)


def programs_of(inputs: Inputs) -> dict[str, Run]:
    """Name of a tile → the launch of its program. Gradients are of zeros instead of an output."""
    from surogate_kernels_triton import attention

    q, k, v, dy, sinks = (t.detach() for t in (inputs.q, inputs.k, inputs.v, inputs.dy, inputs.sinks))
    tokens, heads, features = q.shape
    whole = q.new_zeros(tokens, heads * features + attention.ROOM)
    out = whole[:, : heads * features].view(q.shape)
    lse, delta = torch.full((heads, tokens), 14.0, device=q.device), torch.zeros(heads, tokens, device=q.device)
    named = inputs.case.named(sinks)
    case = attention._Case(q=q, k=k, v=v, borders=inputs.borders, scale=inputs.scale, window=inputs.case.window)
    arguments = (q, k, v, inputs.borders, inputs.scale)
    calls = {
        "forward": lambda: attention._forward(*arguments, whole, lse, **named),
        "queries": lambda: attention._query_gradients(case, dy, out, lse, delta, torch.empty_like(q)),
        "keys": lambda: attention._key_gradients(case, dy, lse, delta, torch.empty_like(k), torch.empty_like(v)),
    }

    def alone(call: Callable[[], None]) -> Sequence[Tensor]:
        call()
        return []

    return {name: partial(alone, call) for name, call in calls.items()}


def sweep(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The time of each program with each of its tiles. The queries' program has three products, the keys' four."""
    found, timed = [], gpu_ms if device.type == "cuda" else cpu_ms
    for case in cases(args):
        inputs = Inputs(case, args.tokens, device, torch.bfloat16 if device.type == "cuda" else torch.float16)
        for setting in args.tiles:
            name = setting.partition("=")[0]
            products = {"forward": 2, "queries": 3, "keys": 4}[name] * case.pairs(args.tokens)
            with patches([setting]):
                try:
                    ms = timed(programs_of(inputs)[name], args.repeats)
                except Exception as error:  # of Triton's compiler
                    print(f"{setting}: {(str(error).splitlines() or [type(error).__name__])[-1][:100]}", flush=True)
                    continue
            tflops = products * 2 * HEADS[case.features][0] * case.features / ms / 1e9
            found.append(asdict(case) | {"tiles": setting, "ms": ms, "tflops": tflops})
            print(f"{case.features:4} {case.row:6} {case.window:6} {setting:24} {ms:8.3f} ms {tflops:7.1f}", flush=True)
    return found


def patches(settings: Sequence[str]) -> ExitStack:
    """The Triton pack computes plain attention of every head size itself, with tiles such as ``forward=128x64w8s2``."""
    stack = ExitStack()
    if find_spec("triton") is None:
        return stack
    from surogate_kernels_triton import attention

    tiles = {}
    for setting in settings:
        found = re.fullmatch(r"(\w+)=(\d+)x(\d+)w(\d+)s(\d+)", setting)
        if found is None:
            raise SystemExit(f"--tiles: {setting} is not like forward=128x64w8s2")
        m, t, warps, stages = map(int, found.groups()[1:])
        tiles[found[1]] = attention.Tile(m=m, t=t, warps=warps, stages=stages)
    before = attention.tiles_for
    stack.enter_context(patch.object(attention, "HEAD_SIZES", range(attention.WIDEST + 1)))
    stack.enter_context(patch.object(attention, "tiles_for", lambda *args: replace(before(*args), **tiles)))
    return stack


def show(row: Row, plain: Row | None) -> None:
    """A line of the table. `plain`: the same pack's case without extensions."""
    ratio = ""
    if plain is not None and plain is not row:
        forward, backward = (
            getattr(plain, f"{way}_tflops") / getattr(row, f"{way}_tflops") for way in ("forward", "backward")
        )
        ratio = f"{forward:5.2f} {backward:5.2f}"
    print(
        f"{row.pack:8} {row.features:4} {row.row:6} {row.window or '-':>6} {'yes' if row.sinks else '-':>5} "
        f"{row.forward_ms:9.3f} {row.backward_ms:9.3f} {row.forward_tflops:8.1f} {row.backward_tflops:8.1f} "
        f"{ratio:11} {row.error:8.1e} {'yes' if row.equal else 'NO'}",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 512, 1024, 4096])
    parser.add_argument("--sinks", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--packs", nargs="+", choices=PACKS, default=PACKS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiles", nargs="+", default=[], help="the Triton pack's, e.g. forward=128x64w8s2")
    parser.add_argument("--sweep", action="store_true", help="time Triton's programs with each of --tiles")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile; 0: at the first run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few small cases, to try the script")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.features, args.rows, args.windows, args.tokens, args.repeats = [16], [64, 128], [0, 16], 128, 2
    if args.sweep:
        args.tiles, args.sinks = args.tiles or list(SWEPT), False
    return args


def main() -> None:
    """Measure what the command line asks for."""
    args = parsed()
    with patches(args.tiles if args.compile or not args.sweep else []):
        if args.compile:
            compile_one(args.tiles[0].partition("=")[0] if args.sweep else "", *args.compile)
        else:
            measure(args)


def table(args: argparse.Namespace, device: torch.device) -> list[Row]:
    """Every case by every pack."""
    print("pack     feat    row window sinks forward ms backw. ms  forward   backw. vs plain     error equal")
    rows: list[Row] = []
    for case in cases(args):
        for pack in args.packs:
            try:
                row = measured(pack, case, args.tokens, device, args.repeats)
            except RuntimeError as error:
                print(f"{pack:8} {case.features:4} {case.row:6}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            if row is None:
                continue
            rows.append(row)
            same = {**asdict(replace(case, window=0, sinks=False)), "pack": pack}
            show(row, next((r for r in rows if same.items() <= asdict(r).items()), None))
    return rows


def measure(args: argparse.Namespace) -> None:
    """Compile, measure and write what was found."""
    begun, device = time.perf_counter(), torch.device(args.device)
    if device.type == "cuda" and "triton" in args.packs and args.jobs:
        compile_ahead(args)
        print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
    found = sweep(args, device) if args.sweep else [asdict(row) for row in table(args, device)]
    print(f"{time.perf_counter() - begun:.0f} s")
    if args.json is not None:
        about = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"}
        about |= {"torch": torch.__version__, "tokens": args.tokens, "tiles": args.tiles}
        args.json.write_text(json.dumps(about | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
