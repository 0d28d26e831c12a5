"""Training on two Ray nodes of k GPUs each, beside `launcher=local` with the same 2 k GPUs.

    python benchmarks/ray_nodes.py [--gpus 1] [--only NAME …] [--lines NAME …] [--preset 1.7b] [--steps 30]
    python benchmarks/ray_nodes.py --device cpu --tiny  # without a GPU: the script itself

Needs `surogate-launcher-ray[cluster]` and one machine with 2 k GPUs. The nodes are two raylets of it, each with GPUs of
its own. This tests the launcher on GPUs; it cannot show what a network between machines costs. The lines:

- local: one machine. Copy engines move the data (`fabric=auto`).
- local, nccl: NCCL moves it, as between machines.
- ray: two nodes, of which the run believes that they are two machines, so NCCL moves the data. NCCL itself sees one
  machine and uses its NVLink. Compared with "local, nccl", this is the cost of the launcher.
- ray, sockets: `NCCL_HOSTID` makes NCCL too believe in two machines. What they exchange goes through TCP inside this
  one: slower than a network for machines with GPUs.

Each line is a whole `surogate sft`, on random weights of Qwen3's shapes and packed rows of embedded conversations, with
4 micro-batches of 2 × 2048 tokens per GPU in a step. All have the same steps and seed. tok/s is the median of the steps
after the first ones. "First step" is the time from the command to the end of step 1, with Ray already started. One
command runs before each case, so that all lines find compiled programs. "Moved by" has the fabric of the run's log and
the ways between GPUs of NCCL's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_command
from bench_ranks import cause

from surogate_core.launch.gpus import VISIBLE, visible

SKIPPED = 5
"""Steps that warm up."""
FULL = ("lora=false", "optimizer=adamw_8bit", "master_dtype=bf16", "zero_level=1")
CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "LoRA": ("0.6b", ("lora=true",)),
    "full, level 1": ("1.7b", FULL),
    "full, HSDP": ("1.7b", FULL),
}
"""Name → preset and keys. `keys_of` adds those that depend on the number of GPUs."""
HSDP = "full, HSDP"
"""The case in which each node is a replica; it needs two GPUs on each."""
LINES: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "local, nccl": ("fabric=nccl",),
    "ray": ("launcher=ray", "launcher.num_nodes=2"),
    "ray, sockets": ("launcher=ray", "launcher.num_nodes=2"),
}
HEADS = ("case", "line", "tok/s", "of local", "ms a step", "first step", "moved by", "loss first … last")


@contextlib.contextmanager
def two_nodes(options: argparse.Namespace, *, apart: bool) -> Iterator[str]:
    """The address of a Ray cluster of two nodes. `apart`: NCCL takes them for two machines."""
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found, unused-ignore]

    gpus = visible(os.environ)[: 2 * options.gpus] if options.device == "cuda" else []
    nodes: list[dict[str, Any]] = []
    for number in range(2):
        own = gpus[number * options.gpus : (number + 1) * options.gpus]
        variables = {VISIBLE: ",".join(own), **({"NCCL_HOSTID": f"node-{number}"} if apart else {})}
        nodes.append({"num_cpus": 2, "num_gpus": len(own), "env_vars": variables})
    cluster = Cluster(initialize_head=True, head_node_args={**nodes[0], "include_dashboard": False})
    try:
        cluster.add_node(**nodes[1])
        cluster.wait_for_nodes()
        yield str(cluster.address)
    finally:
        cluster.shutdown()


def keys_of(case: str, line: str, directory: Path, options: argparse.Namespace, steps: int) -> list[str]:
    """The keys of a command."""
    preset, own = CASES[case]
    shared = {"device": options.device, "steps": steps, "tiny": options.tiny}
    keys = bench_command.overrides(directory, gpus=2 * options.gpus, **shared)
    if not options.tiny:
        keys.append(f"model.preset={options.preset or preset}")
    if case == HSDP:
        keys.append(f"dp_shard_size={options.gpus}")
    there = tuple("fabric=gloo" if key == "fabric=nccl" and options.device == "cpu" else key for key in LINES[line])
    return [*keys, *own, *there]


def measure(case: str, line: str, options: argparse.Namespace, steps: int) -> dict[str, Any]:
    """One command's figures."""
    row: dict[str, Any] = {"case": case, "line": line, "gpus": 2 * options.gpus}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-nodes-")))
        # Ranks get these from either launcher. By default the launchers divide the cores differently.
        threads = max((os.cpu_count() or 1) // (2 * options.gpus), 1)
        own = {"OMP_NUM_THREADS": str(threads), "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{directory}/nccl.%h.%p"}
        if "launcher=ray" in LINES[line]:
            own["RAY_ADDRESS"] = stack.enter_context(two_nodes(options, apart=line == "ray, sockets"))
        words = bench_command.command(*keys_of(case, line, directory, options, steps))
        began = time.time()
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=options.limit, check=False, env={**os.environ, **own}
            )
        except subprocess.TimeoutExpired:
            return {**row, "error": f"stopped after {options.limit:.0f} s"}
        after, taken = time.time(), bench_command.steps_of(directory)
        if done.returncode or len(taken) < steps:
            return {**row, "error": cause(done.stderr) or f"exit status {done.returncode}", "log": done.stderr[-3000:]}
        moved = moved_by(directory)
    return {
        **row,
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in taken[SKIPPED:]),
        "milliseconds": 1e3 * statistics.median(step["seconds"] for step in taken[SKIPPED:]),
        "first_seconds": taken[0]["time"] - began,
        "seconds": after - began,
        "moved_by": moved,
        "losses": [taken[0]["loss"], taken[-1]["loss"]],
    }


def moved_by(directory: Path) -> list[str]:
    """What has moved data between the ranks: the fabric, and the ways that NCCL has found."""
    logs = [(directory / "run" / "surogate.log").read_text(), *(f.read_text() for f in directory.glob("nccl.*"))]
    fabrics = re.findall(r'"chosen": "(\w+)", "event": "fabric"', logs[0])
    ways = {way for text in logs[1:] for way in re.findall(r" via ((?:P2P|SHM|NET)/\w+)", text)}
    return [*dict.fromkeys(fabrics), *sorted(ways)]


def cells(row: Mapping[str, Any], local: float | None) -> list[str]:
    """A line of the table. `local`: tokens a second of the case's local line."""
    if "error" in row:
        return [row["case"], row["line"], "failed: " + row["error"].replace("|", "\\|"), *[""] * 5]
    first, last = row["losses"]
    return [
        row["case"],
        row["line"],
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_second'] / local:.1%}" if local else "",
        f"{row['milliseconds']:.1f}",
        f"{row['first_seconds']:.1f} s",
        ", ".join(row["moved_by"]),
        f"{first:.5f} … {last:.5f}",
    ]


def run(options: argparse.Namespace) -> None:
    """Measure and print every line of every case."""
    print("| " + " | ".join(HEADS) + " |\n|" + " --- |" * len(HEADS), flush=True)
    for case in options.only:
        warm = measure(case, "local", options, SKIPPED + 1) if options.compile else {}
        if "error" in warm:
            print(warm.get("log") or warm["error"], file=sys.stderr)
        local: float | None = None
        for line in [name for _ in range(options.repeats) for name in options.lines]:
            row = measure(case, line, options, options.steps)
            if line == "local":
                local = row.get("tokens_per_second")
            print("| " + " | ".join(cells(row, local)) + " |", flush=True)
            print(row.get("log", ""), end="", file=sys.stderr)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of each node")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="default: all that fit --gpus")
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES), metavar="LINE")
    parser.add_argument("--preset", help="of all cases, instead of each case's own")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no command before each case")
    parser.add_argument("--limit", type=float, default=240, help="seconds for each command")
    parser.add_argument("--out", type=Path, default=Path("ray_nodes.jsonl"), help="gets a JSON line for each command")
    options = parser.parse_args(arguments)
    options.only = options.only or [case for case in CASES if case != HSDP or options.gpus > 1]
    if options.steps <= SKIPPED or (HSDP in options.only and options.gpus < 2):
        parser.error(f"--steps must be more than {SKIPPED}, and {HSDP!r} needs --gpus 2 or more")
    if options.device == "cuda" and len(visible(os.environ)) < 2 * options.gpus:
        parser.error(f"--gpus {options.gpus}: two nodes need {2 * options.gpus} GPUs")
    # Some machines show little memory until it is used; Ray would end the supervisors there.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    run(options)


if __name__ == "__main__":
    main()
