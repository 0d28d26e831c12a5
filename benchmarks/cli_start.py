"""How long the commands take that answer at once: median seconds of whole processes.

python benchmarks/cli_start.py [--runs 7]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = (["--help"], ["--version"], ["plugins", "list"])


def seconds(arguments: list[str]) -> float:
    """Wall time of one process."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "surogate_core.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    for command in COMMANDS:
        print(f"surogate {' '.join(command)}: {statistics.median(seconds(command) for _ in range(runs)):.3f} s")


if __name__ == "__main__":
    main()
