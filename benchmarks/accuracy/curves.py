"""`curves`: the runs of `reinforce` as a table and as a picture: held-out problems solved by step, mean over seeds."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from accuracy.reinforce import LINES
from surogate_core.files.metrics import METRICS, read_metrics

COLOURS = {"bf16": "#0b62a4", "fp8-hybrid": "#c4600a", "nf4": "#2d8a4e", "trl": "#888"}
LEFT, TOP, WIDTH, HEIGHT = 50, 20, 480, 260
STYLE = "text{font:13px sans-serif;fill:#222}@media(prefers-color-scheme:dark){text{fill:#ddd}}"

Curve = dict[int, float]
"""Optimizer step → share of held-out problems solved."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--to", type=Path, help="directory of reinforce.md and reinforce.svg; OUT without it")


TINY: dict[str, int] = {}
"""Options of a trial on a CPU."""


def run(given: argparse.Namespace) -> None:
    """Write both."""
    found = {line: curves(given.out / "reinforce", line) for line in LINES}
    found = {line: of for line, of in found.items() if of}
    if not found:
        raise SystemExit(f"curves: {given.out}/reinforce has no runs. Fix: run `reinforce` first.")
    to = given.to or given.out
    to.mkdir(parents=True, exist_ok=True)
    text = markdown(found)
    (to / "reinforce.md").write_text(text, encoding="utf-8")
    (to / "reinforce.svg").write_text(picture(found), encoding="utf-8")
    print(text)


def curves(place: Path, line: str) -> list[Curve]:
    """The curve of every seed of a line; ours from `metrics.jsonl`, the peer's from its result."""
    if line == "trl":
        results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(place.glob("trl-s*.json"))]
        return [{one["step"]: one["share"] for one in result["held"]} for result in results]
    runs = [read_metrics(file, event="rollout_eval") for file in sorted(place.glob(f"{line}-s*/{METRICS}"))]
    return [{one["step"]: one["reward"]["mean"] for one in held} for held in runs]


def mean(of: Sequence[Curve], step: int) -> tuple[float, float, int]:
    """(the mean over seeds, its standard error, the seeds) at a step."""
    values = [curve[step] for curve in of if step in curve]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error, len(values)


def steps_of(of: Sequence[Curve]) -> list[int]:
    """The steps that a seed was evaluated at."""
    return sorted({step for curve in of for step in curve})


def markdown(found: Mapping[str, Sequence[Curve]]) -> str:
    """A line for each precision, a column for each evaluation."""
    steps = sorted({step for of in found.values() for step in steps_of(of)})
    text = [f"| solved, % | {' | '.join(f'step {step}' for step in steps)} |", "| --- " * (len(steps) + 1) + "|"]
    for line, of in found.items():
        cells = []
        for step in steps:
            if step not in steps_of(of):
                cells.append("")
                continue
            value, error, seeds = mean(of, step)
            spread = "" if math.isnan(error) else f" ± {100 * error:.1f}"
            cells.append(f"{100 * value:.1f}{spread}" + (f" ({seeds} of {len(of)})" if seeds < len(of) else ""))
        text.append(f"| {line}, {len(of)} seed{'s' * (len(of) > 1)} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


def picture(found: Mapping[str, Sequence[Curve]]) -> str:
    """The same as SVG: thin lines for seeds, thick ones for their means."""
    last = max(step for of in found.values() for step in steps_of(of)) or 1
    values = [value for of in found.values() for curve in of for value in curve.values()]
    low, high = math.floor(10 * min(values)) / 10, max(math.ceil(10 * max(values)), 1) / 10

    def at(step: int, value: float) -> str:
        x = LEFT + WIDTH * step / last
        return f"{x:.1f},{TOP + HEIGHT * (1 - (value - low) / max(high - low, 0.1)):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 130} {TOP + HEIGHT + 40}" role="img" '
        f'aria-label="Held-out problems solved by step of GRPO"><style>{STYLE}</style>'
    ]
    for value in (low, (low + high) / 2, high):
        y = float(at(0, value).split(",")[1])
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" stroke="#bbb"/>')
        parts.append(f'<text x="8" y="{y + 4}">{100 * value:.0f} %</text>')
    parts += [f'<text x="{LEFT + WIDTH * s / last:.0f}" y="{TOP + HEIGHT + 22}">{s}</text>' for s in (0, last)]
    for number, (line, of) in enumerate(found.items()):
        colour = COLOURS[line]
        middle = {step: mean(of, step)[0] for step in steps_of(of)}
        for curve, width in [*((curve, 0.7) for curve in of), (middle, 2.5)]:
            points = " ".join(at(step, value) for step, value in sorted(curve.items()))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        name = "TRL, bf16" if line == "trl" else line
        y = TOP + 20 + 22 * number
        parts.append(f'<text x="{LEFT + WIDTH + 12}" y="{y}" style="fill:{colour}">{name}</text>')
    return "".join([*parts, "</svg>\n"])
