"""Our training step and the installed peers' on one GPU: one run, one table as Markdown and JSON.

    python benchmarks/gpu_peers.py [--sizes 0.6b 1.7b 4b 8b] [--modes lora full pretrain] [--recompute off on]
                                   [--peers transformers liger unsloth] [--out DIR]
                                   [--batches 2x2048 8x512 1x8192] [--documents row lognormal tiny]
    python benchmarks/gpu_peers.py --only full:1.7b pretrain:0.6b

Every line of the table is a process of its own. All sides get the same random tokens, `--batches` a
micro-step and 4 micro-steps an optimizer step, and Qwen3's published shapes with random weights. A line
is the median of whole optimizer steps by CUDA events, after three to warm up. Each process measures the
product of 8192³ first; the ceiling is the median of all lines'. Set-up is wall-clock time from the start
of the process to the end of its first step, imports and compilation included, what this script itself
takes left out. `pretrain` is the work of `full`, from weights that the initialiser gave. The files are
written again after every line, so that a line that fails or hangs (`--limit`) costs only itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from bench_ranks import cause
from presets import PRESETS

WARM_UP = 3
"""Steps before the clock starts; the first of them ends the set-up."""
TINY = {"LENGTH": 64, "MICRO_STEPS": 2}
"""What `--tiny` makes of the constants of gpu_lora.py."""
BATCH = "2x2048"
"""Rows of a micro-step, and tokens of a row."""
OURS, MODES = "surogate", ("lora", "full", "pretrain")
PEERS = {
    "transformers": ("transformers", "peft"),
    "liger": ("transformers", "peft", "liger_kernel"),
    "unsloth": ("unsloth",),
}
"""Peer → the packages that it needs."""
TITLES = {
    OURS: "Surogate",
    "transformers": "transformers + PEFT",
    "liger": "transformers + PEFT + Liger",
    "unsloth": "Unsloth",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table, as its process receives it."""

    size: str
    mode: str
    documents: str
    recompute: bool
    side: str
    steps: int
    device: str
    tiny: bool
    attention: str
    ours: str
    """Further options of gpu_lora.py for ours."""
    profile: bool
    batch: str = BATCH
    again: bool = False
    """A second start of ours for its set-up alone."""

    @property
    def group(self) -> tuple[str, str, str, str, bool]:
        """The settings that compared lines share."""
        return self.size, self.mode, self.batch, self.documents, self.recompute

    def __str__(self) -> str:
        recompute = "on" if self.recompute else "off"
        again = " again" if self.again else ""
        return f"{self.size} {self.mode} {self.batch} {self.documents} recompute {recompute} {self.side}{again}"


# --------------------------------------------------------------------- the process of a line


def work_line(line: Line, started: float) -> dict[str, Any]:
    """Measure one line in this process, which began at `started` (seconds since the epoch)."""
    import torch

    if line.side == "unsloth":
        # It patches torch and transformers, and wants to come before them.
        import unsloth  # noqa: F401
    before = time.time()
    import gpu_lora
    import peers  # noqa: F401  (so that its time counts as this script's)

    # What this script itself takes is none of a side's set-up; ours needs these modules anyway.
    own = 0.0 if line.side == OURS else time.time() - before
    gpu_lora.ROWS, gpu_lora.LENGTH = map(int, line.batch.split("x"))
    if line.tiny:
        for name, value in TINY.items():
            setattr(gpu_lora, name, value)
    full = line.mode != "lora"
    flags = ["--documents", line.documents, *(["--full"] if full else []), *(["--recompute"] if line.recompute else [])]
    options = gpu_lora.make_parser().parse_args([line.size, *flags, *shlex.split(line.ours)])
    device = torch.device(line.device, torch.cuda.current_device()) if line.device == "cuda" else torch.device("cpu")
    torch.zeros(1, device=device)
    imported, before = time.time() - started - own, time.time()
    gemm = ceiling(device)
    own += time.time() - before
    borders = max(gpu_lora.borders_of(line.documents), options.borders)
    batches = gpu_lora.make_batches(line.documents, PRESETS[line.size]["vocab_size"], borders)
    if line.side == OURS:
        assembly = gpu_lora.make_assembly(options, device, batches[0].cu_seqlens.numel())
        side = _ours(gpu_lora.engine_of(assembly), batches)
    else:
        side = _peer(line, batches, device)
    losses = [side.step()]
    _synchronize(device)
    setup = time.time() - started - own
    losses += [side.step() for _ in range(WARM_UP - 1)]

    def step() -> None:
        losses.append(side.step())

    times = gpu_lora.timed(step, line.steps) if device.type == "cuda" else cpu_times(step, line.steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    tokens = sum(b.tokens for b in batches)
    milliseconds = statistics.median(times)
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "gemm_tflops": gemm,
        "tokens_per_second": tokens / milliseconds * 1e3,
        "milliseconds": milliseconds,
        "milliseconds_all": times,
        "tokens_per_step": tokens,
        "gflop_per_token": gpu_lora.gflop_per_token(line.size, batches, full=full),
        "peak_gib": peak,
        "planned_gib": _planned(assembly) if line.side == OURS and device.type == "cuda" else None,
        "import_seconds": imported,
        "setup_seconds": setup,
        "losses": [read() for read in losses],
        "facts": dict(side.facts),
        "profile": gpu_lora.profile(step, 2) if line.profile and line.side == OURS and device.type == "cuda" else None,
    }


def ceiling(device: Any) -> float:
    """TFLOP/s of a product, measured; what the measurement took is freed and not in the peak."""
    import gpu_lora
    import torch

    if device.type != "cuda":
        return _cpu_ceiling()
    rate: float = gpu_lora.gemm_tflops(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return rate


def _peer(line: Line, batches: Sequence[Any], device: Any) -> Any:
    import gpu_lora
    import peers

    work = peers.Work(
        preset=line.size,
        config=PRESETS[line.size],
        full=line.mode != "lora",
        recompute=line.recompute,
        rank=gpu_lora.RANK,
        scale=2.0,
        rows=gpu_lora.ROWS,
        attention=line.attention,
        device=device,
        batches=batches,
    )
    return peers.build_peer(line.side, work)


def _planned(assembly: Any) -> float:
    """GiB of torch's tensors that `surogate plan` would predict."""
    import plan_memory

    from surogate_core.engine.planning.prediction import predict

    return plan_memory.in_torch(predict(assembly)) / 2**30


def _ours(engine: Any, batches: Sequence[Any]) -> Any:
    import peers

    number = 0

    def step() -> Callable[[], float]:
        nonlocal number
        result = engine.train_step(batches, step=number, lr=1e-4)
        number += 1
        return lambda: result.read()[0]

    parameters, trained = engine.parameters.counts()
    facts = {
        "parameters": parameters,
        "trained": trained,
        "kernels": {op: name for (op, _), name in engine.programs.kernels.chosen.items()},
    }
    return peers.Side(step=step, facts=facts)


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def cpu_times(step: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of each call, by the clock."""
    times = []
    for _ in range(count):
        before = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - before))
    return times


def _cpu_ceiling() -> float:
    """So that `--device cpu` has a figure in every place: a product of 256³, which is no ceiling of anything."""
    import torch

    a = torch.ones(256, 256, dtype=torch.bfloat16)
    return 2 * 256**3 / statistics.median(cpu_times(lambda: a @ a, 3)) / 1e9


# ------------------------------------------------------------------------------ all the lines


def plan(options: argparse.Namespace, peers: Sequence[str]) -> list[Line]:
    """The lines in their order: those that are compared follow each other, ours first."""
    pairs = [tuple(pair.split(":")) for pair in options.only] or list(product(options.modes, options.sizes))
    lines = []
    for (mode, size), batch, documents, recompute in product(
        pairs, options.batches, options.documents, options.recompute
    ):
        for side in (OURS, *peers):
            line = Line(
                size=size,
                mode=mode,
                documents=documents,
                recompute=recompute == "on",
                side=side,
                steps=options.steps,
                device=options.device,
                tiny=options.tiny,
                attention=options.attention,
                ours=options.ours,
                profile=options.profile,
                batch=f"{batch.partition('x')[0]}x{TINY['LENGTH']}" if options.tiny else batch,
            )
            lines.append(line)
            if side == OURS and options.again:
                lines.append(Line(**{**asdict(line), "again": True, "steps": 1, "profile": False}))
    return lines


def start(
    line: Any,
    limit: float,
    environment: Mapping[str, str],
    *,
    script: Sequence[str] = (sys.executable, __file__),
) -> dict[str, Any]:
    """The result of a line (a dataclass), from a process of its own.

    ``{"error": …}`` if it fails or takes longer than `limit` seconds.
    """
    with tempfile.TemporaryDirectory() as place:
        result, log = Path(place, "result.json"), Path(place, "log")
        command = [*script, "--line", json.dumps(asdict(line)), "--started", repr(time.time())]
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [*command, "--result", str(result)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(timeout=max(1.0, limit))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Its children too: compilers outlive a parent that is killed.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        text = log.read_text(errors="replace")
        if code is None:
            return {"error": f"stopped after {limit:.0f} s", "log": text[-3000:]}
        # A line that is measured and then fails on its way out is measured.
        with contextlib.suppress(OSError, ValueError):
            return json.loads(result.read_text())
        return {"error": cause(text) or f"exit status {code}", "log": text[-3000:]}


def finish(found: list[tuple[Line, dict[str, Any]]]) -> tuple[float | None, list[dict[str, Any]]]:
    """(the run's ceiling in TFLOP/s, the lines with SOL by it and with the ratio of ours to each)."""
    gemms = [result["gemm_tflops"] for _, result in found if "error" not in result]
    ceiling = statistics.median(gemms) if gemms else None
    ours = {
        line.group: result["tokens_per_second"]
        for line, result in found
        if line.side == OURS and not line.again and "error" not in result
    }
    rows = []
    for line, result in found:
        row = {**asdict(line), **result}
        if "error" not in result and not line.again:
            row["speed_of_light"] = result["gflop_per_token"] * result["tokens_per_second"] / ceiling / 1e3
            if line.side != OURS and line.group in ours:
                row["ours_over_this"] = ours[line.group] / result["tokens_per_second"]
        rows.append(row)
    return ceiling, rows


def markdown(report: Mapping[str, Any]) -> str:
    """The table, what it was measured on, and what did not run."""
    devices = dict.fromkeys(row["gpu"] for row in report["lines"] if "gpu" in row)
    text = [f"{', '.join(devices) or 'nothing ran'}; {report['versions']}."]
    if report["gemm_tflops"]:
        each = report["gemm_tflops_each"]
        text += [f"Product of 8192³: {report['gemm_tflops']:.0f} TFLOP/s, {min(each):.0f} to {max(each):.0f} by line."]
    heads = ["model", "mode", "rows", "documents", "recompute", "side", "tok/s", "ours ÷ this", "ms a step", "SOL"]
    heads += ["GiB", "planned", "set-up", "loss first … last"]
    text += ["", "| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for row in report["lines"]:
        recompute = "on" if row["recompute"] else "off"
        cells = [row["size"], row["mode"], row["batch"], row["documents"], recompute, _title(row)]
        if "error" in row:
            cells += ["failed: " + row["error"].replace("|", "\\|"), *[""] * 7]
        else:
            measured = not row["again"]
            ratio, peak, losses = row.get("ours_over_this"), row["peak_gib"], row["losses"]
            cells += [
                f"{row['tokens_per_second'] / 1e3:.1f}k" if measured else "",
                f"{ratio:.2f}" if ratio else "",
                f"{row['milliseconds']:.1f}" if measured else "",
                f"{row['speed_of_light']:.1%}" if measured else "",
                "" if peak is None else f"{peak:.1f}",
                f"{row['planned_gib']:.1f}" if row.get("planned_gib") else "",
                f"{row['setup_seconds']:.1f} s",
                f"{losses[0]:.3f} … {losses[-1]:.3f}",
            ]
        text.append("| " + " | ".join(cells) + " |")
    text += [""] + [f"- {name}: {why}." for name, why in report["absent"].items()]
    for row in report["lines"]:
        if row.get("profile"):
            found = row["profile"]
            kinds = ", ".join(f"{kind} {value:.1f}" for kind, value in found["milliseconds_by_kind"].items())
            text.append(
                f"- {row['size']} {row['mode']} {row['documents']}, ours: idle {found['idle']:.1%}, "
                f"{found['launches']} launches a step; milliseconds a step by kind: {kinds}."
            )
    return "\n".join(text) + "\n"


def _title(row: Mapping[str, Any]) -> str:
    if row["again"]:
        return "Surogate, started again"
    title = TITLES[row["side"]]
    return title if row["mode"] == "lora" else title.replace(" + PEFT", "")


def versions(peers: Sequence[str] = ("transformers", "peft", "liger_kernel", "unsloth")) -> str:
    """The versions of what is installed of torch, these packages and what ours needs."""
    found = []
    for name in ("torch", "triton", *peers, "cupy-cuda13x", "cupy-cuda12x"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def lacking(names: Sequence[str]) -> dict[str, str]:
    """Peers that cannot run here, with the reason; nothing of theirs is imported."""
    found = {}
    for name in names:
        missing = [package for package in PEERS[name] if importlib.util.find_spec(package) is None]
        if missing:
            found[name] = f"not installed ({', '.join(missing)})"
    return found


def environment(cold: str | None) -> dict[str, str]:
    """The environment of the lines: no network; with `cold`, that directory replaces every compiler's cache."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if cold:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH"):
            found[name] = str(Path(cold, name.lower()))
    return found


def make_parser() -> argparse.ArgumentParser:
    """The options of a run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=list(PRESETS), default=["0.6b", "1.7b", "4b", "8b"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["lora"])
    parser.add_argument("--only", nargs="+", default=[], metavar="MODE:SIZE", help="these instead of modes × sizes")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--documents", nargs="+", choices=["row", "lognormal", "tiny"], default=["row"])
    parser.add_argument("--batches", nargs="+", default=[BATCH], metavar="ROWSxLENGTH", help="of a micro-step")
    parser.add_argument("--recompute", nargs="+", choices=["off", "on"], default=["off"])
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a line, after 3 that are not")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a line may take")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds that the run may take")
    parser.add_argument("--profile", action="store_true", help="ours also with kernel time by kind")
    parser.add_argument("--cold", action="store_true", help="compilers' caches start empty")
    parser.add_argument("--again", action="store_true", help="start ours twice: set-up with warm caches")
    parser.add_argument("--ours", default="", metavar="OPTIONS", help="for gpu_lora.py, such as '--packs triton'")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of the peers")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--name", default="gpu_peers", help="of the files in --out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="short rows, to try the script itself")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def run(options: argparse.Namespace, cold: str | None) -> dict[str, Any]:
    """Every line in turn; both files are written after each."""
    absent = lacking(options.peers)
    lines = plan(options, [name for name in options.peers if name not in absent])
    for name, why in absent.items():
        print(f"{TITLES[name]}: {why}", file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    surroundings = environment(cold)
    began, known = time.monotonic(), versions()
    found: list[tuple[Line, dict[str, Any]]] = []
    report: dict[str, Any] = {}
    for number, line in enumerate(lines, start=1):
        before = time.monotonic()
        left = options.budget - (before - began)
        # What is left must do for a start at least; a line that could not end would only cost time.
        result = start(line, min(options.limit, left), surroundings) if left > 10 else {"error": "no time left"}
        found.append((line, result))
        ceiling, rows = finish(found)
        report = {
            "versions": known,
            "gemm_tflops": ceiling,
            "gemm_tflops_each": [row["gemm_tflops"] for row in rows if "gemm_tflops" in row],
            "absent": {TITLES[name]: why for name, why in absent.items()},
            "cold": cold is not None,
            "lines": rows,
        }
        Path(options.out, f"{options.name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
        Path(options.out, f"{options.name}.md").write_text(markdown(report), encoding="utf-8")
        told = (
            result.get("error") or f"{result['tokens_per_second']:,.0f} tok/s, set-up {result['setup_seconds']:.1f} s"
        )
        took = time.monotonic() - before
        print(f"[{number}/{len(lines)}] {line}: {told} ({took:.0f} s)", file=sys.stderr, flush=True)
    return report


def main() -> None:
    """Run the lines, or, told so by itself, one."""
    parser = make_parser()
    options = parser.parse_args()
    if options.line:
        result = work_line(Line(**json.loads(options.line)), options.started)
        options.result.write_text(json.dumps(result), encoding="utf-8")
        return
    for pair in options.only:
        mode, _, size = pair.partition(":")
        if mode not in MODES or size not in PRESETS:
            parser.error(f"--only {pair}: it is MODE:SIZE, such as full:1.7b")
    with tempfile.TemporaryDirectory() if options.cold else contextlib.nullcontext() as cold:
        print(markdown(run(options, cold)))


if __name__ == "__main__":
    main()
