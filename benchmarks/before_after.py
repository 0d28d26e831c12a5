"""Speed of this tree as a ratio to another tree's, in turns on one GPU: whether a change kept the speed.

    python benchmarks/before_after.py OTHER [--cases lora-0.6b lora-8b …] [--rounds 2] [--out found.json]
    python benchmarks/before_after.py OTHER --packages SITE [--ours SITE]   # where the distributions are installed
    python benchmarks/before_after.py OTHER --cases small       # tiny, on a CPU: the script itself

OTHER is a checkout of the earlier version. Its benchmarks run with its own packages: those in SITE (as `pip install
--target SITE` leaves them) or, without it, the sources of OTHER with the plugins that are installed here. Where the two
versions have different distributions, give both sites and leave ours out of PYTHONPATH. Each round
runs a case in both trees, in processes of their own and in the order that the round before did not have; a tree's
figure is its best of all rounds. `ratio` is ours divided by the other's: 1.00 or more means that nothing was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
CASES: Mapping[str, tuple[str, ...]] = {
    "lora-0.6b": ("gpu_lora.py", "0.6b", "--json"),
    "lora-0.6b-fp8": ("gpu_lora.py", "0.6b", "--recipe", "fp8-hybrid", "--json"),
    "lora-8b": ("gpu_lora.py", "8b", "--json"),
    "lora-8b-fp8": ("gpu_lora.py", "8b", "--recipe", "fp8-hybrid", "--json"),
    "full-1.7b": ("gpu_lora.py", "1.7b", "--full", "--json"),
    "moe-30b-a3b": ("gpu_lora.py", "moe-30b-a3b", "--recompute", "--steps", "4", "--json"),
    "generate-0.6b": ("generate.py", "--cases", "bf16", "--out"),
    "grpo-0.6b": ("grpo.py", "--steps", "8", "--cases", "lora", "--out"),
    "small": ("generate.py", "--small", "--cases", "bf16", "--out"),
}
"""Case → its script and options; the name of a file of results follows."""


@dataclass(slots=True)
class Found:
    """The figures of a case; larger is better."""

    case: str
    unit: str = ""
    ours: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Our best figure by the other's."""
        return max(self.ours) / max(self.other) if self.ours and self.other else None


def figure(fields: Any) -> tuple[float, str]:
    """(figure of a file of results, its unit); the file has one case or a list of one."""
    fields = fields[0] if isinstance(fields, list) else fields
    if fields.get("error"):
        raise ValueError(fields["error"])
    if "tokens_per_second" in fields:
        return float(fields["tokens_per_second"]), "tok/s"
    return 3600 / float(fields["seconds"]), "steps/h"


def measured(tree: Path, packages: Path | None, case: str, limit: float) -> tuple[float, str]:
    """(figure of a case in a tree, its unit); raises `ValueError` with the end of what a failed script said."""
    script, *options = CASES[case]
    path = [str(packages or tree), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "found.json")
        command = [sys.executable, str(tree / "benchmarks" / script), *options, str(out)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path if p)}
        try:
            done = subprocess.run(
                command, env=environment, cwd=directory, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"not done in {limit:.0f} s") from None
        if not out.is_file():
            raise ValueError((done.stderr or done.stdout).strip()[-400:])
        return figure(json.loads(out.read_text(encoding="utf-8")))


def compare(case: str, trees: Mapping[str, tuple[Path, Path | None]], rounds: int, limit: float) -> Found:
    """Both trees in turns."""
    found = Found(case)
    for turn in range(rounds):
        for name in sorted(trees, reverse=turn % 2 == 1):
            try:
                value, found.unit = measured(*trees[name], case, limit)
            except ValueError as error:
                found.errors.append(f"{name}: {error}")
                continue
            getattr(found, name).append(value)
    return found


def table(every: Sequence[Found]) -> str:
    """Markdown."""
    lines = ["| case | before | after | ratio |", "| --- | --- | --- | --- |"]
    for one in every:
        before, after = (f"{max(v):,.0f} {one.unit}" if v else "failed" for v in (one.other, one.ours))
        ratio = f"{one.ratio:.3f}" if one.ratio else "; ".join(one.errors)[:200]
        lines.append(f"| {one.case} | {before} | {after} | {ratio} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a case has no ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--packages", type=Path, help="where its distributions are installed")
    parser.add_argument("--ours", type=Path, help="where the distributions of this tree are installed")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=[c for c in CASES if c != "small"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds that a script may take")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args(arguments)
    ours, packages = (site and site.resolve() for site in (words.ours, words.packages))
    trees = {"ours": (HERE, ours), "other": (words.other.resolve(), packages)}
    every: list[Found] = []
    for case in words.cases:
        every.append(compare(case, trees, words.rounds, words.limit))
        print(table(every[-1:]).splitlines()[-1], flush=True)
        if words.out is not None:
            fields = [{**asdict(one), "ratio": one.ratio} for one in every]
            words.out.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    print(table(every))
    return int(any(one.ratio is None for one in every))


if __name__ == "__main__":
    raise SystemExit(main())
