"""The figures that need four GPUs of one machine, in one run: training, experts shared out, GRPO, resumes, kills.

    python benchmarks/four_gpus.py --out DIR [--budget 1500] [--only PART …]
    python benchmarks/four_gpus.py --out DIR --device cpu --tiny      # without a GPU: the script itself

Each part runs other scripts of this directory, either one command on all GPUs or a list of commands for each GPU, side
by side. Parts run in the order of `PARTS` until the time is up; what a command prints and writes is in a directory of
its own below `--out`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import lanes
from lanes import Command, Lane

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
    "sparse-full": training([*SPARSE_FULL, LARGE], worlds=GPUS, profile=True),
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


def lanes_of(part: Command | Sequence[Sequence[Command]]) -> list[Lane]:
    """The lanes of a part."""
    if isinstance(part[0], str):
        return [(list(range(GPUS)), [part])]  # type: ignore[list-item]
    return [([gpu], list(commands)) for gpu, commands in enumerate(part)]


def run_part(name: str, options: argparse.Namespace, until: float) -> tuple[list[str], list[str]]:
    """Run a part; see `lanes.run`."""
    cache = options.cache or options.out / "cache"
    found = lanes_of(PARTS[name])
    return lanes.run(
        name,
        [(None, commands) for _, commands in found] if options.tiny else found,
        options.out,
        until,
        lambda command, place: lanes.words_of(command, place, tiny=options.tiny, cache=cache),
    )


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
            print(lanes.said(options.out / label), flush=True)
    print("\n".join(failed))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
