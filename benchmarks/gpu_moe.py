"""Qwen3-30B-A3B's shape on one GPU, ours and the installed peers': one run, one table as Markdown and JSON.

    python benchmarks/gpu_moe.py [--only bf16 "nf4, recomputed" …] [--steps 4] [--profile] [--out DIR]
    python benchmarks/gpu_moe.py --device cpu --tiny   # without a GPU: the script itself

Random weights, documents of 2048 tokens, 32,768 tokens an optimizer step. Routing is uneven: of 128 experts the
largest gets about 10 times the mean (shapes.py); the table says what was measured. Adapters have r=16 and stand on all
projections, those of experts included, unless the line's name says otherwise. Every line is a process of its own, and
the median of whole optimizer steps by CUDA events. Memory is what torch reserved, beside what `surogate plan`
predicts of it. The files are written again after every line, so a line that fails costs only itself.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_peers

PRESET, TINY = "moe-30b-a3b", "moe-tiny"
ROWS, MICRO_STEPS = 8, 2
"""Our lines have these, unless they keep all activations. A peer's line may have fewer rows and more micro-steps."""
KEPT_ROWS = 4
"""Rows of a line of ours with adapters and without recomputation: 8 do not fit into 120 GiB in bf16."""
OURS: Mapping[str, str] = {
    "bf16": "",
    "bf16, recomputed": "--recompute",
    "bf16, attention alone": "--targets attention",
    "fp8-hybrid": "--recipe fp8-hybrid",
    "fp8-hybrid, recomputed": "--recipe fp8-hybrid --recompute",
    "nvfp4, recomputed": "--recipe nvfp4 --recompute",
    "nf4": "--base nf4",
    "nf4, recomputed": "--base nf4 --recompute",
    "nf4, experts offloaded, recomputed": "--base nf4 --offload-experts --recompute",
    "fp8 base, recomputed": "--base fp8 --recompute",
    "nvfp4 base, recomputed": "--base nvfp4 --recompute",
    "full, 6 layers": "--full --layers 6 --optimizer adamw_8bit",
    "full, 6 layers, balanced over the step": "--full --layers 6 --optimizer adamw_8bit --router-losses step",
    "full, 6 layers, balanced by micro-batch": "--full --layers 6 --optimizer adamw_8bit --router-losses micro_batch",
}
"""Line → options of gpu_lora.py."""
LIKE = {
    "bf16, recomputed": "bf16",
    "bf16, attention alone": "bf16",
    "fp8-hybrid": "bf16",
    "fp8-hybrid, recomputed": "bf16, recomputed",
    "nvfp4, recomputed": "bf16, recomputed",
    "nf4": "bf16",
    "nf4, recomputed": "bf16, recomputed",
    "nf4, experts offloaded, recomputed": "bf16, recomputed",
    "fp8 base, recomputed": "bf16, recomputed",
    "nvfp4 base, recomputed": "bf16, recomputed",
    "full, 6 layers, balanced over the step": "full, 6 layers",
    "full, 6 layers, balanced by micro-batch": "full, 6 layers",
}
"""Line → ours that its speed is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A line of another program."""

    side: str
    experts: bool
    """Whether experts have adapters."""
    recompute: bool
    rows: int
    like: str
    """Our line with the same work."""


PEERS: Mapping[str, Peer] = {
    "transformers, attention alone": Peer(
        side="transformers", experts=False, recompute=False, rows=2, like="bf16, attention alone"
    ),
    "transformers, checkpointing": Peer(
        side="transformers", experts=True, recompute=True, rows=2, like="bf16, recomputed"
    ),
    "unsloth, attention alone": Peer(
        side="unsloth", experts=False, recompute=False, rows=2, like="bf16, attention alone"
    ),
    "unsloth, checkpointing": Peer(side="unsloth", experts=True, recompute=True, rows=2, like="bf16, recomputed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What the process of a line receives."""

    name: str
    steps: int
    warm_up: int
    device: str
    tiny: bool
    profile: bool
    more: str
    """Further options of gpu_lora.py for ours; peers take the number of layers from them."""


# ---------------------------------------------------------------------- the process of a line


def work_line(line: Line) -> dict[str, Any]:
    """Measure one line in this process."""
    peer = PEERS.get(line.name)
    if peer is not None and peer.side == "unsloth":
        # It patches torch and transformers, and wants to come before them.
        import unsloth  # noqa: F401
    import gpu_lora
    import torch

    rows = rows_of(line.name) if peer is None else peer.rows
    gpu_lora.ROWS, gpu_lora.MICRO_STEPS = (1, 2) if line.tiny else (rows, MICRO_STEPS * ROWS // rows)
    if line.tiny:
        gpu_lora.LENGTH = 64
    preset = TINY if line.tiny else PRESET
    device = torch.device("cuda", torch.cuda.current_device()) if line.device == "cuda" else torch.device("cpu")
    options = gpu_lora.make_parser().parse_args(
        [preset, *shlex.split(OURS.get(line.name, "")), *shlex.split(line.more)]
    )
    if line.tiny:
        options.layers = 0
    gemm = gpu_lora.gemm_tflops(device) if line.device == "cuda" else None
    batches = gpu_lora.make_batches("row", gpu_lora.PRESETS[preset]["vocab_size"], gpu_lora.ROWS + 1)
    started = time.perf_counter()
    results: list[Any] = []
    config = dict(gpu_lora.PRESETS[preset])
    if options.layers:
        config["num_hidden_layers"] = options.layers
    side = _ours(options, device, batches, results) if peer is None else _peer(peer, preset, config, device, batches)
    figures = _timed(side, line, started)
    return {
        "gemm_tflops": gemm,
        "tokens_per_step": sum(b.tokens for b in batches),
        **side.facts,
        **figures,
        "imbalance": imbalance(results[-1]) if results else None,
        "gflop_per_token": gpu_lora.gflop_per_token(preset, batches, full=options.full, layers=options.layers),
    }


def rows_of(name: str) -> int:
    """Rows of a micro-batch of our line."""
    return ROWS if "recomputed" in name or name.startswith("full") else KEPT_ROWS


def _ours(options: argparse.Namespace, device: Any, batches: Sequence[Any], results: list[Any]) -> Any:
    """Our side; `results` gets those of its steps."""
    import gpu_lora
    import peers
    import plan_memory

    from surogate_core.engine.planning.prediction import predict

    assembly = gpu_lora.make_assembly(options, device, batches[0].cu_seqlens.numel())
    facts: dict[str, Any] = {"predicted_gib": plan_memory.in_torch(predict(assembly)) / 2**30}
    engine = gpu_lora.engine_of(assembly)
    facts |= dict(zip(("parameters", "trained"), engine.parameters.counts(), strict=True))
    facts["frozen_gib"] = gpu_lora.frozen_gib(engine)

    def step() -> Callable[[], float]:
        result = engine.train_step(batches, step=len(results), lr=1e-4)
        results.append(result)
        facts["kernels"] = {op: kernel for (op, _), kernel in engine.programs.kernels.chosen.items()}
        return lambda: float(result.read()[0])

    return peers.Side(step=step, facts=facts)


def _peer(peer: Peer, preset: str, config: dict[str, Any], device: Any, batches: Sequence[Any]) -> Any:
    import gpu_lora
    import peers
    import peers_moe
    import torch

    torch.manual_seed(0)
    work = peers.Work(
        preset=preset,
        config=config,
        full=False,
        recompute=peer.recompute,
        rank=gpu_lora.RANK,
        scale=2.0,
        rows=gpu_lora.ROWS,
        attention="sdpa",
        device=device,
        batches=batches,
    )
    make = peers_moe.unsloth_side if peer.side == "unsloth" else peers_moe.transformers_side
    return make(work, experts=peer.experts)


def _timed(side: Any, line: Line, started: float) -> dict[str, Any]:
    """Set-up, speed and memory of a side that is ready for its first step."""
    import gpu_lora
    import torch

    cuda = line.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses = [side.step()]
    first = losses[0]()
    setup = time.perf_counter() - started
    losses += [side.step() for _ in range(line.warm_up - 1)]

    def step() -> None:
        losses.append(side.step())

    times = gpu_lora.timed(step, line.steps) if cuda else gpu_peers.cpu_times(step, line.steps)
    milliseconds = statistics.median(times)
    tokens = gpu_lora.MICRO_STEPS * gpu_lora.ROWS * gpu_lora.LENGTH
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "tokens_per_second": tokens / milliseconds * 1e3,
        "milliseconds": milliseconds,
        "milliseconds_all": times,
        "setup_seconds": setup,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "device_gib": gpu_lora.device_gib() if cuda else None,
        "losses": [first, *(read() for read in losses[1:])],
        "profile": gpu_lora.profile(step, 2) if line.profile and cuda else None,
    }


def imbalance(result: Any) -> list[float] | None:
    """Largest load of an expert ÷ the mean, in the layer with the least, on average and with the most; ours alone."""
    loads = next((total for role, total in result.sides().values() if role == "expert_tokens"), None)
    if loads is None:
        return None
    found = (loads.amax(dim=1) / loads.mean(dim=1)).tolist()
    return [min(found), statistics.fmean(found), max(found)]


# ------------------------------------------------------------------------------ all the lines


def markdown(found: Mapping[str, dict[str, Any]]) -> str:
    """The table."""
    heads = ["line", "tok/s", "÷ ours in bf16", "ours ÷ this", "ms a step", "SOL", "reserved", "plan", "device"]
    heads += ["set-up", "imbalance least, mean, most", "loss first … last"]
    text = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]

    def ratio(a: str | None, b: str | None) -> str:
        first, second = (found.get(n or "", {}).get("tokens_per_second") for n in (a, b))
        return f"{first / second:.3f}" if first and second else ""

    def size(row: Mapping[str, Any], field: str) -> str:
        return "" if row.get(field) is None else f"{row[field]:.1f} GiB"

    for name, row in found.items():
        if "tokens_per_second" not in row:
            text.append(f"| {name} | failed: {row.get('error')} |" + " |" * (len(heads) - 2))
            continue
        sol = row["gemm_tflops"] and row["gflop_per_token"] * row["tokens_per_second"] / row["gemm_tflops"] / 1e3
        peer, losses = PEERS.get(name), row["losses"]
        cells = [
            name,
            f"{row['tokens_per_second']:,.0f}",
            ratio(name, LIKE.get(name)),
            ratio(peer.like if peer else None, name),
            f"{row['milliseconds']:.1f}",
            f"{sol:.1%}" if sol else "",
            *(size(row, field) for field in ("reserved_gib", "predicted_gib", "device_gib")),
            f"{row['setup_seconds']:.1f} s",
            ", ".join(f"{v:.1f}" for v in row["imbalance"] or ()),
            f"{losses[0]:.3f} … {losses[-1]:.3f}",
        ]
        text.append("| " + " | ".join(cells) + " |")
    for name, row in found.items():
        if row.get("profile"):
            kinds = ", ".join(f"{k} {v:.1f}" for k, v in row["profile"]["milliseconds_by_kind"].items())
            text += ["", f"{name}: idle {row['profile']['idle']:.1%}; milliseconds a step by kind: {kinds}."]
    return "\n".join(text) + "\n"


def make_parser() -> argparse.ArgumentParser:
    """The options of a run."""
    names = [*OURS, *PEERS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LINE", help="; ".join(names))
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a line")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a line may take")
    parser.add_argument("--profile", action="store_true", help="with kernel times by kind")
    parser.add_argument("--more", default="", metavar="OPTIONS", help="for gpu_lora.py, such as --layers 12")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the tiny shape, to try the script itself")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Run the lines, or, told so by itself, one."""
    options = make_parser().parse_args()
    if options.line:
        result = work_line(Line(**json.loads(options.line)))
        options.result.write_text(json.dumps(result, default=str), encoding="utf-8")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print(gpu_peers.versions())
    found: dict[str, dict[str, Any]] = {}
    for name in options.only:
        line = Line(
            name=name,
            steps=options.steps,
            warm_up=options.warm_up,
            device=options.device,
            tiny=options.tiny,
            profile=options.profile,
            more=options.more,
        )
        before = time.monotonic()
        script = (sys.executable, __file__)
        found[name] = gpu_peers.start(line, options.limit, gpu_peers.environment(None), script=script)
        text = markdown(found)
        Path(options.out, "gpu_moe.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        Path(options.out, "gpu_moe.md").write_text(text, encoding="utf-8")
        said = found[name].get("error") or f"{found[name]['tokens_per_second']:,.0f} tok/s"
        print(f"{name}: {said} ({time.monotonic() - before:.0f} s)", file=sys.stderr, flush=True)
    print(markdown(found))


if __name__ == "__main__":
    main()
