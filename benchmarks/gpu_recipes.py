"""Recipes beside each other on one GPU: every line of one table from one run, as Markdown and JSON.

    python benchmarks/gpu_recipes.py [--sizes 0.6b 1.7b 4b 8b] [--full 1.7b] [--together 7] [--profile] [--out DIR]

A line is one configuration of gpu_lora.py in a process of its own. `--together` processes set
themselves up at the same time (imports, weights, compilation, the first step); then each is timed
while all others wait. What they hold must fit on the GPU: seven of the eight of a whole table do.
Times are gpu_lora.py's. Set-up is shared here, so its time is not reported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OPTIMIZERS = ("adamw", "adamw_8bit")
RECIPES = ("bf16", "fp8-hybrid")
BASE = "bf16"
"""The recipe with which the others are compared."""
MARK = "gpu_recipes: "
"""Before what a line's process tells; other output passes."""


def work_line(arguments: Sequence[str]) -> None:
    """The process of a line: sets itself up and measures, each on command."""
    import gpu_lora

    def turn(said: str) -> None:
        print(MARK + said, flush=True)
        sys.stdin.readline()

    turn("imported")
    result = gpu_lora.measure(gpu_lora.make_parser().parse_args(arguments), turn=lambda: turn("ready"))
    print(MARK + json.dumps({name: getattr(result, name) for name in gpu_lora.Result.__slots__}), flush=True)


class Line:
    """One configuration, and the process that measures it; `command` begins that process."""

    def __init__(self, arguments: Sequence[str], log: Path, command: Sequence[str] = (sys.executable, __file__)):
        self.arguments = list(arguments)
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, "--line", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )

    def hear(self) -> str:
        """The next line of the process; empty if it ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return line.removeprefix(MARK).strip()
        return ""

    def go_on(self) -> None:
        """Let the process do its next part."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It ended; `hear` says so.
            print(file=self.process.stdin, flush=True)

    def finish(self) -> dict[str, Any]:
        """Its result, or ``{"error": …}``."""
        self.go_on()
        told = self.hear()
        code = self.process.wait()
        if told:
            found: dict[str, Any] = json.loads(told)
            return found
        last = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return {"error": (last[-1] if last else f"exit status {code}")[:200]}


def run(lines: Sequence[Line], together: int) -> list[dict[str, Any]]:
    """The results, in order; `together` at a time are set up side by side, none is timed beside another."""
    results = []
    for line in lines:
        line.hear()
    for first in range(0, len(lines), together):
        group = lines[first : first + together]
        for line in group:
            line.go_on()
        for line in group:
            line.hear()
        results += [line.finish() for line in group]
    return results


def configurations(options: argparse.Namespace) -> list[tuple[str, bool, str]]:
    """(size, all weights or LoRA, recipe) of each line; the largest last."""
    lora = [(size, False, recipe) for size in options.sizes for recipe in options.recipes]
    return lora + [(size, True, recipe) for size in options.full for recipe in options.recipes]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, what it was measured on, and profiles."""
    done = [row for row in rows if "error" not in row]
    rates = [row["gemm_tflops"] for row in done]
    text = ["nothing ran"]
    if done:
        text = [f"{done[0]['device']}; product of 8192³: {min(rates):.0f} to {max(rates):.0f} TFLOP/s by line."]
    base = {(row["size"], row["full"]): row["tokens_per_second"] for row in done if row["recipe"] == BASE}
    text += ["", "| model | trained | recipe | tok/s | ÷ bf16 | ms a step | GiB | loss first … last |"]
    text += ["| " + " | ".join(["---"] * 8) + " |"]
    for row in rows:
        cells = [row["size"], "all weights" if row["full"] else "LoRA", row["recipe"]]
        if "error" in row:
            cells += ["failed: " + row["error"].replace("|", "\\|"), *[""] * 4]
        else:
            known = base.get((row["size"], row["full"]))
            losses = row["losses"]
            cells += [
                f"{row['tokens_per_second'] / 1e3:.1f}k",
                f"{row['tokens_per_second'] / known:.2f}" if known and row["recipe"] != BASE else "",
                f"{row['milliseconds']:.1f}",
                f"{row['peak_gib']:.1f}",
                f"{losses[0]:.3f} … {losses[-1]:.3f}",
            ]
        text.append("| " + " | ".join(cells) + " |")
    for row in done:
        if row["profile"]:
            found = row["profile"]
            name = f"{row['size']}, {'all weights' if row['full'] else 'LoRA'}, {row['recipe']}"
            text += ["", f"{name}: idle {found['idle']:.1%}, {found['launches']} launches a step", ""]
            text += [f"    {ms:9.2f} ms  {kind}" for kind, ms in found["milliseconds_by_kind"].items()]
            text += [
                f"    {k['milliseconds']:9.2f} ms {k['calls']:6.0f} × {k['name'][:90]}" for k in found["kernels"][:32]
            ]
    return "\n".join(text) + "\n"


def make_parser() -> argparse.ArgumentParser:
    """The options of a run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", nargs="*", default=["0.6b", "1.7b", "4b", "8b"], help="for LoRA")
    parser.add_argument("--full", nargs="*", default=[], metavar="SIZE", help="with all weights trained")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="of the lines with --full")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--together", type=int, default=1, help="lines set up at the same time")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a line")
    parser.add_argument("--profile", action="store_true", help="of lines other than bf16's")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure every line, print the table, write it."""
    options = make_parser().parse_args()
    if options.line is not None:
        work_line(options.line)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = configurations(options)
    lines = []
    for size, full, recipe in wanted:
        flags = ["--full", "--optimizer", options.optimizer] if full else []
        flags += ["--profile"] if options.profile and recipe != BASE else []
        log = options.out / f"gpu_recipes_{size}_{'full' if full else 'lora'}_{recipe}.log"
        lines.append(Line([size, "--recipe", recipe, "--steps", str(options.steps), *flags], log))
    rows = [
        {"size": size, "full": full, "recipe": recipe, **result}
        for (size, full, recipe), result in zip(wanted, run(lines, options.together), strict=True)
    ]
    text = markdown(rows)
    print(text)
    (options.out / "gpu_recipes.md").write_text(text)
    (options.out / "gpu_recipes.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
