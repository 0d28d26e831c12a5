"""How long commands take to answer: seconds of whole processes, and seconds to the first line on a terminal.

python benchmarks/cli_start.py [--runs 7]

The plan is measured with empty caches and with what an earlier plan has left there. Each figure is the median of the
runs; user time does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

SUROGATE = [sys.executable, "-m", "surogate_core.cli.main"]
AT_ONCE = (["--help"], ["--version"], ["plugins", "list"], ["plan", "--help"])
PLAN = ["plan", "model=qwen3-0.6b", "--gpu", "h200"]
FIRST_LINES = (["demo", "output_dir=out"], ["sft", "output_dir=out"], ["chat", "runs/none"], PLAN)
"""Commands that load torch before they do anything; they are stopped when their first line is there."""


def whole(arguments: list[str], directory: Path) -> tuple[float, float]:
    """(wall, user) seconds of one process."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(directory)}
    command = [*SUROGATE, *arguments]
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd=directory
    )
    return time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def first_line(arguments: list[str], directory: Path) -> tuple[float, str]:
    """(seconds until a terminal shows the first line, the line); the process is ended then."""
    ours, theirs = pty.openpty()
    begin = time.perf_counter()
    process = subprocess.Popen([*SUROGATE, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, cwd=directory)
    os.close(theirs)
    text = b""
    while b"\n" not in text:
        text += os.read(ours, 4096)
    seconds = time.perf_counter() - begin
    process.kill()
    process.wait()
    os.close(ours)
    return seconds, text.decode(errors="replace").splitlines()[0]


def medians(runs: int, measure: Callable[[], tuple[float, float]]) -> str:
    """The medians of wall and user time, as words."""
    wall, user = (statistics.median(values) for values in zip(*(measure() for _ in range(runs)), strict=True))
    return f"{wall:.2f} s, user time {user:.2f} s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as name:
        caches = Path(name)
        for command in AT_ONCE:
            print(f"surogate {' '.join(command)}: {medians(runs, partial(whole, command, caches))}")
        words = " ".join(PLAN)
        print(f"surogate {words}, empty caches: {medians(1, partial(whole, PLAN, caches))}")
        print(f"surogate {words}, again: {medians(runs, partial(whole, PLAN, caches))}")
        # Another length of the rows is another plan.
        longer = [*PLAN, "sequence_len=4096"]
        print(f"surogate {words} sequence_len=4096, not planned before: {medians(1, partial(whole, longer, caches))}")
        here = ["plan", "model=qwen3", "model.preset=tiny", "device=cpu"]
        whole(here, caches)
        print(f"surogate {' '.join(here)}, counted before: {medians(runs, partial(whole, here, caches))}")
        for command in FIRST_LINES:
            found = [first_line(command, caches) for _ in range(runs)]
            seconds, line = statistics.median(seconds for seconds, _ in found), found[0][1]
            print(f"surogate {' '.join(command)}: {line!r} after {seconds:.2f} s")


if __name__ == "__main__":
    main()
