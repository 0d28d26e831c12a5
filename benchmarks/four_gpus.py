"""The figures that need four GPUs of one machine, in one run: training, experts shared out, GRPO, resumes, kills.

    python benchmarks/four_gpus.py --out DIR [--budget 1500] [--only PART …]
    python benchmarks/four_gpus.py --out DIR --device cpu --tiny      # without a GPU: the script itself

Each part runs other scripts of this directory, either one command on all GPUs or a list of commands for each GPU, side
by side. Parts run in the order of `PARTS` until the time is up; what a command prints and writes is in a directory of
its own below `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kill_rank import descendants

GPUS = 4
LORA, HOT = "30B-A3B LoRA bf16", "30 % on four experts"
SHARED = f"{LORA}, experts shared out"
SPARSE = (LORA, SHARED, f"{SHARED}, {HOT}", f"{SHARED}, {HOT}, evened out", f"{SHARED}, even routes")
SPARSE_FULL = ("30B-A3B full, level 1, experts shared out", "30B-A3B full, level 3")
LARGE = "235B-A22B QLoRA nf4, experts shared out"
DENSE = tuple(
    f"{size} full{recipe}, level {level}, accumulation 4"
    for size in ("8B", "4B")
    for recipe in ("", " fp8")
    for level in (1, 3)
)
ALONE = tuple(name for name in DENSE if "level 1" in name)
"""What one GPU is compared with: levels do not differ there."""
PEERS = tuple(f"{size} full, FSDP2 {kind}, accumulation 4" for size in ("8B", "4B") for kind in ("bf16", "float8"))
BITS = (
    "LoRA, experts shared out, evened out",
    "LoRA fp8, experts shared out, evened out",
    "full, level 1, experts shared out, evened out",
)

Command = Sequence[str]
"""Script and its arguments."""


def training(names: Sequence[str], *, worlds: int, profile: bool = False) -> Command:
    """A command of several_gpus.py."""
    extra = ["--profile"] if profile else []
    return ["several_gpus.py", "--worlds", str(worlds), "--limit", "150", "--budget", "600", *extra, "--only", *names]


def reinforcement(model: str, *, gpus: int, samples: int, rows: int) -> Command:
    """A command of grpo.py, LoRA."""
    words = ["grpo.py", "--model", model, "--cases", "lora", "--samples", str(samples), "--rows", str(rows)]
    return [*words, "--steps", "4", "--options", f"gpus={gpus}"]


PARTS: Mapping[str, Command | Sequence[Sequence[Command]]] = {
    "sparse": training(SPARSE, worlds=GPUS, profile=True),
    "alone": [
        [training([LORA], worlds=1), reinforcement("qwen3-0.6b", gpus=1, samples=128, rows=16)],
        [training(ALONE[:2], worlds=1)],
        [training(ALONE[2:], worlds=1)],
        [reinforcement("qwen3-8b", gpus=1, samples=128, rows=8)],
    ],
    "sparse-full": training([*SPARSE_FULL, LARGE], worlds=GPUS),
    "dense": training(DENSE, worlds=GPUS),
    "bits": ["equal_bits.py", "--worlds", "1", "2", "4", "--limit", "60", "--only", *BITS],
    "grpo-0.6b": reinforcement("qwen3-0.6b", gpus=GPUS, samples=128, rows=16),
    "grpo-8b": reinforcement("qwen3-8b", gpus=GPUS, samples=128, rows=8),
    "peers": ["several_gpus_peers.py", "--worlds", str(GPUS), "--only", *PEERS],
    "kill": [
        *("kill_rank.py", "--gpus", str(GPUS), "--signal", "KILL"),
        *("--keys", "model=qwen3-moe-30b-a3b", f"ep_size={GPUS}", "recompute=true"),
    ],
    "grpo-0.6b-wide": reinforcement("qwen3-0.6b", gpus=GPUS, samples=512, rows=16),
    "grpo-8b-wide": reinforcement("qwen3-8b", gpus=GPUS, samples=512, rows=8),
}
"""Name → a command on all GPUs, or the commands that each GPU runs one after the other."""


def lanes_of(part: Command | Sequence[Sequence[Command]]) -> list[tuple[list[int], list[Command]]]:
    """(its GPUs, its commands) of every lane of a part."""
    if isinstance(part[0], str):
        return [(list(range(GPUS)), [part])]  # type: ignore[list-item]
    return [([gpu], list(commands)) for gpu, commands in enumerate(part)]


def words_of(command: Command, place: Path, options: argparse.Namespace) -> list[str]:
    """The command as a process runs it, with its results in `place`."""
    script, *rest = command
    small = ["--device", "cpu", "--tiny"] if options.tiny else []
    if script == "grpo.py":
        # Its list of options takes all that follows.
        small = ["--small"] if options.tiny else []
        rest = ["--out", str(place / "grpo.json"), *small, *rest]
    elif script == "kill_rank.py":
        rest = ["--json", str(place / "kill_rank.json"), *small, *rest]
    else:
        cache = [] if script == "several_gpus_peers.py" else ["--cache", str(options.cache or options.out / "cache")]
        rest = ["--out", str(place), *cache, *small, *rest]
    return [sys.executable, str(Path(__file__).with_name(script)), *rest]


def run_part(name: str, options: argparse.Namespace, until: float) -> tuple[list[str], list[str]]:
    """Run a part's lanes side by side; (labels of the commands that began, words about each that did not end well)."""
    lanes = [(gpus, list(enumerate(commands))) for gpus, commands in lanes_of(PARTS[name])]
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    begun: list[str] = []
    failed: list[str] = []
    try:
        while running or any(commands for _, commands in lanes):
            for lane, (gpus, commands) in enumerate(lanes):
                if lane in running:
                    label, process = running[lane]
                    if process.poll() is None and time.monotonic() < until:
                        continue
                    if why := end(process):
                        failed.append(f"{label}: {why}")
                    del running[lane]
                if commands and time.monotonic() < until:
                    number, command = commands.pop(0)
                    begun.append(f"{name}.{lane}.{number}")
                    running[lane] = begun[-1], begin(command, options.out / begun[-1], gpus, options)
                elif commands:
                    failed += [f"{name}.{lane}.{number}: no time" for number, _ in commands]
                    commands.clear()
            time.sleep(0.1)
    finally:
        for _, process in running.values():
            end(process)
    return begun, failed


def begin(command: Command, place: Path, gpus: Sequence[int], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a command of a lane; what it prints goes to ``log`` in its directory."""
    place.mkdir(parents=True, exist_ok=True)
    surroundings = dict(os.environ)
    if not options.tiny:
        surroundings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    with (place / "log").open("wb") as log:
        return subprocess.Popen(
            words_of(command, place, options),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=surroundings,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> str:
    """Why a command did not end well, or "". One that still runs is killed, and all that it started with it."""
    if process.poll() is None:
        # Ranks are in sessions of their own.
        for each in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
        return "stopped"
    code = process.returncode
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}" if code else ""


def main() -> None:
    """Run the parts, and print the end of what each command said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--budget", type=float, default=1500, help="seconds for all")
    parser.add_argument("--cache", type=Path, help="directory of compiled programs; below --out without it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, to try the script itself")
    options = parser.parse_args()
    options.tiny = options.tiny or options.device == "cpu"
    began, failed = time.monotonic(), list[str]()
    for name in options.only:
        begun, why = run_part(name, options, began + options.budget)
        failed += why
        print(f"== {name}, after {time.monotonic() - began:.0f} s", flush=True)
        for label in begun:
            text = (options.out / label / "log").read_text(errors="replace")
            said = [line for line in text.splitlines() if line.strip()]
            print("\n".join(line[:240] for line in said[-16:]), flush=True)
    print("\n".join(failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
