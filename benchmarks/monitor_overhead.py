"""What the local monitors cost of a step, in one process: steps with and without them take turns.

A small model trains on the CPU with steps of about 50 ms. Every pair of steps has one whose figures go to the
monitors (console, jsonl, adaptive, tensorboard and web, a page open on the last) and one whose figures go nowhere, in
random order.
Printed are the time that the thread of the loop spends in the monitors, as a share of a step of 50 ms, and the
difference of the pairs, which also sees what threads beside it cost: in time, and in time that the loop's thread was
on a CPU, which hardly sees what else the machine does.

    OMP_NUM_THREADS=1 python benchmarks/monitor_overhead.py [--pairs 400] [--live] [--json FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bench
import torch
from rich.console import Console
from surogate_model_qwen3.model import build

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Monitor
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import RandomSource
from surogate_core.events import EvalEnd, RunEnd, RunInfo, RunStart, StepEnd
from surogate_core.plugins.registry import load_plugins
from surogate_core.train.bus import EventBus

NAMES = ("console", "jsonl", "adaptive", "tensorboard", "web")
STEP = 0.050
"""Seconds of the step that the share is of."""

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


def make_engine(tokens: int) -> Engine:
    """A small engine on the CPU."""
    device = torch.device("cpu")
    settings = EngineSettings(device=device, tokens=tokens, borders=2, max_seqlen=tokens)
    return Engine(bench.assemble(build(SHAPE), settings), RandomSource(seed=0, std=0.02, device=device))


def make_batch(tokens: int) -> MicroBatch:
    """Random tokens, each a label but the last."""
    ids = torch.randint(0, SHAPE["vocab_size"], (tokens,), generator=torch.Generator().manual_seed(0))
    labels = torch.roll(ids, -1)
    labels[-1] = -100
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        positions=torch.arange(tokens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        max_seqlen=tokens,
        tokens=tokens,
        label_tokens=tokens - 1,
    )


def make_monitors(directory: str, *, live: bool) -> dict[str, Monitor]:
    """All local monitors with their defaults; the console writes to memory."""
    registry, built = load_plugins(), {}
    info = RunInfo(run_name="r", output_dir=directory, task="sft", config={"learning_rate": 1e-3}, interactive=False)
    for name in NAMES:
        spec = registry.get("monitor", name)
        built[name] = spec.build(spec.options(), info)
    from surogate_monitor_console.live import LiveView
    from surogate_monitor_console.options import ConsoleOptions
    from surogate_monitor_console.plain import PlainView

    built["console"].close()
    if live:
        terminal = Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
        built["console"] = LiveView(ConsoleOptions(), info, console=terminal)
    else:
        built["console"] = PlainView(ConsoleOptions(), info, stream=io.StringIO())
    return built


class Timed:
    """A monitor, and the time that it takes."""

    def __init__(self, inner: Monitor):
        self.inner, self.seconds, self.cpu_seconds = inner, list[float](), list[float]()
        self.state, self.load_state, self.close = inner.state, inner.load_state, inner.close

    def on_event(self, event: Any) -> Any:
        """As the monitor; the time of steps is kept."""
        started = time.perf_counter(), time.thread_time()
        answer = self.inner.on_event(event)
        if isinstance(event, StepEnd):
            self.seconds.append(time.perf_counter() - started[0])
            self.cpu_seconds.append(time.thread_time() - started[1])
        return answer


def watch(url: str, over: threading.Event) -> None:
    """A page that is open: it asks every two seconds."""
    while not over.wait(2.0):
        with urllib.request.urlopen(url.replace("/?", "/figures?")) as reply:
            reply.read()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--live", action="store_true", help="the console's live view instead of plain lines")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = _options()
    tokens = 256
    engine, shuffle = make_engine(tokens), random.Random(0)
    number, losses = 0, []

    def train(micro_steps: int) -> tuple[float, float]:
        nonlocal number
        result = engine.train_step([make_batch(tokens)] * micro_steps, step=number, lr=1e-3)
        number += 1
        return result.read()

    train(1)
    started = time.perf_counter()
    for _ in range(5):
        train(1)
    micro_steps = max(1, round(STEP / ((time.perf_counter() - started) / 5)))
    with tempfile.TemporaryDirectory() as directory:
        timed = {name: Timed(monitor) for name, monitor in make_monitors(directory, live=options.live).items()}
        bus, nothing, over = EventBus(timed), EventBus({}), threading.Event()
        start = RunStart(
            model="m", parameters=1, trainable_parameters=1, train_tokens=1, steps=2 * options.pairs, start_step=0,
            tokens_per_step=tokens, epochs=1.0, device="cpu",
        )  # fmt: skip
        bus.emit(start)
        url = (Path(directory) / "web.url").read_text().strip()
        threading.Thread(target=watch, args=(url, over), daemon=True).start()
        told, differences, on_cpu, plain = 0, [], [], []
        for _ in range(options.pairs):
            took, busy = {}, {}
            for watched in shuffle.sample([True, False], 2):
                began, began_on_cpu = time.perf_counter(), time.thread_time()
                loss, norm = train(micro_steps)
                told += watched
                event = StepEnd(
                    step=told, epoch=0.1, loss=loss, grad_norm=norm, lr=1e-3, tokens=tokens, label_tokens=tokens,
                    total_tokens=tokens * told, seconds=STEP, tokens_per_second=1e4, eta_seconds=1.0,
                    peak_memory_bytes=2**30, speed_of_light=0.5,
                )  # fmt: skip
                (bus if watched else nothing).emit(event)
                busy[watched] = time.thread_time() - began_on_cpu
                took[watched] = time.perf_counter() - began
                losses.append(loss)
            differences.append(took[True] - took[False])
            on_cpu.append(busy[True] - busy[False])
            plain.append(took[False])
        bus.emit(EvalEnd(step=told, loss=1.0, label_tokens=1, seconds=0.1, gap=None))
        bus.emit(
            RunEnd(reason="finished", step=told, seconds=1, first_eval_loss=None, last_eval_loss=1, export_path=None)
        )
        assert bus.names == NAMES, f"disabled: {set(NAMES) - set(bus.names)}"
        over.set()
        bus.close()
    each = {name: statistics.mean(one.seconds) for name, one in timed.items()}
    inside = [sum(times) for times in zip(*(one.seconds for one in timed.values()), strict=True)]
    _show(each, timed, inside, differences, on_cpu, plain)
    if options.json:
        found = {"each": each, "inside": inside, "differences": differences, "on_cpu": on_cpu, "plain": plain}
        options.json.write_text(json.dumps(found))


def _show(
    each: Mapping[str, float],
    timed: Mapping[str, Timed],
    inside: Sequence[float],
    differences: Sequence[float],
    on_cpu: Sequence[float],
    plain: Sequence[float],
) -> None:
    print(f"{len(plain)} pairs of steps of {1e3 * statistics.median(plain):.1f} ms (median)")
    for name, seconds in each.items():
        mean_on_cpu = statistics.mean(timed[name].cpu_seconds)
        print(f"  {name:12} {1e6 * seconds:7.1f} µs a step (mean), {1e6 * mean_on_cpu:.1f} µs of them on the CPU")
    mean, middle, late = statistics.mean(inside), statistics.median(inside), sorted(inside)[int(0.99 * len(inside))]
    print(
        f"in the monitors: mean {1e6 * mean:.0f} µs, median {1e6 * middle:.0f} µs, p99 {1e6 * late:.0f} µs: "
        f"{mean / STEP:.3%} of 50 ms"
    )
    for what, values in (("difference of pairs", differences), ("of the loop's thread on a CPU", on_cpu)):
        print(
            f"{what}: median {1e6 * (usual := statistics.median(values)):+.0f} µs ({usual / STEP:+.3%} of 50 ms), "
            f"mean {1e6 * statistics.mean(values):+.0f} ± {1e6 * statistics.stdev(values) / len(values) ** 0.5:.0f} µs"
        )


if __name__ == "__main__":
    main()
