"""How a run on several GPUs ends if one of its ranks is killed or stopped: seconds, message, what is left behind.

    python benchmarks/kill_rank.py [--gpus 2] [--rank 1] [--signal KILL STOP] [--json FILE]
    python benchmarks/kill_rank.py --gpus 4 --keys model=qwen3-moe-30b-a3b ep_size=4 recompute=true
    python benchmarks/kill_rank.py --device cpu --tiny       # without a GPU

It starts `surogate sft gpus=N`, waits until a few steps are recorded, sends the signal to one rank's process, and
measures the time until the command ends. Then it looks for processes of the run that are left, and for memory that
nvidia-smi still counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_command

SLACK = 16
"""MiB by which two readings of an idle GPU may differ."""
STEPS_BEFORE = 5
"""Steps that are recorded before the signal."""


def descendants(pid: int) -> list[int]:
    """The children of a process, theirs, and so on."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # The name, in brackets, may contain spaces.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there; one that is dead and that nobody has waited for is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def ranks_below(pid: int) -> dict[int, int]:
    """Rank → process of a run that a process started, by the RANK in their environment.

    A rank's own children inherit its RANK; the rank is the one that the run started first.
    """
    found: dict[int, int] = {}
    for child in sorted(descendants(pid)):
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            values = [entry.partition(b"=")[2] for entry in entries if entry.startswith(b"RANK=")]
            if values:
                found.setdefault(int(values[0]), child)
    return found


def gpu_processes() -> list[str] | None:
    """What nvidia-smi lists: ``pid, MiB``; None without it."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return listed.stdout.split("\n")[:-1]


def memory_used() -> list[int] | None:
    """MiB used on each GPU; None without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [int(line) for line in listed.stdout.split()]


def one(number: signal.Signals, options: argparse.Namespace) -> dict[str, Any]:
    """Run the command, send the signal, and see what happens."""
    used_before = memory_used()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        given = bench_command.overrides(
            directory, gpus=options.gpus, device=options.device, steps=100_000, tiny=options.tiny
        )
        if any(key.startswith("model=") for key in options.keys):
            given.remove("model=qwen3")
        chosen = [key for key in options.keys if not (options.tiny and key.startswith("model.preset"))]
        keys = ["lora=true", "num_epochs=100000", *chosen]
        with Path(place, "stderr").open("w+") as said:
            process = subprocess.Popen(bench_command.command(*given, *keys), stdout=said, stderr=said)
            family: list[int] = []
            try:
                ready = _wait_for_steps(process, directory, options.limit)
                family = descendants(process.pid)
                result = _signalled(process, number, options) if ready else {"error": "no steps"}
            finally:
                for pid in [process.pid, *family]:
                    with contextlib.suppress(ProcessLookupError):
                        if process.poll() is None:
                            os.kill(pid, signal.SIGKILL)
            said.seek(0)
            result["message"] = said.read()[-2000:].strip()
        left = [pid for pid in family if is_running(pid)]
        logs = sorted(str(p.relative_to(directory)) for p in directory.rglob("*.log"))
    facts = {"processes_left": left, "logs": logs, "gpu_processes": gpu_processes()}
    return {"signal": number.name, **result, **facts, **_memory_freed(used_before)}


def _memory_freed(before: list[int] | None) -> dict[str, Any]:
    """MiB used now or, if that is more than `before`, as soon as it is no more; and the seconds until then."""
    began, now = time.monotonic(), memory_used()
    while before is not None and now is not None and max(a - b for a, b in zip(now, before, strict=True)) > SLACK:
        if time.monotonic() - began > 30:
            break
        time.sleep(0.2)
        now = memory_used()
    return {"mib_before": before, "mib_after": now, "seconds_until_free": time.monotonic() - began}


def _wait_for_steps(process: subprocess.Popen[bytes], directory: Path, limit: float) -> bool:
    until = time.monotonic() + limit
    while time.monotonic() < until and process.poll() is None:
        if len(bench_command.steps_of(directory)) >= STEPS_BEFORE:
            return True
        time.sleep(0.2)
    return False


def _signalled(process: subprocess.Popen[bytes], number: signal.Signals, options: argparse.Namespace) -> dict[str, Any]:
    ranks = ranks_below(process.pid)
    if options.rank not in ranks:
        return {"error": f"no process of rank {options.rank}: {ranks}"}
    os.kill(ranks[options.rank], number)
    began = time.monotonic()
    try:
        code = process.wait(timeout=options.limit)
    except subprocess.TimeoutExpired:
        return {"error": f"still there after {options.limit:.0f} s"}
    return {"seconds": time.monotonic() - began, "exit_status": code}


def main() -> None:
    """Print what happened at each signal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--signal", nargs="+", choices=["KILL", "STOP", "SEGV"], default=["KILL", "STOP"])
    parser.add_argument("--keys", nargs="*", default=["model.preset=0.6b"], help="keys of the run's configuration")
    parser.add_argument("--limit", type=float, default=120, help="seconds to the first steps, and to the end")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script itself")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [one(signal.Signals[f"SIG{name}"], options) for name in options.signal]
    for result in found:
        took = result.get("error") or f"{result['seconds']:.1f} s, exit status {result['exit_status']}"
        print(f"SIG{result['signal'].removeprefix('SIG')} to rank {options.rank}: {took}")
        print(f"  processes left: {result['processes_left'] or 'none'}; on the GPUs: {result['gpu_processes']}")
        after = f"after {result['mib_after']}, {result['seconds_until_free']:.1f} s after the end"
        print(f"  MiB used before {result['mib_before']}, {after}; logs: {result['logs']}")
        print("  " + result["message"].replace("\n", "\n  "))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    sys.exit(any("error" in result for result in found))


if __name__ == "__main__":
    main()
