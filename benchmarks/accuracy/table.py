"""`table`: the results of all cells as Markdown and as a picture with one point per line and its standard error."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

FIRST = "bf16 bf16"
"""The line that the others are compared with."""
ORDER = ("anchor", "lora", "options", "full")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--to", type=Path, help="directory of accuracy.md, accuracy.json and accuracy.svg; OUT without it"
    )


TINY: dict[str, int] = {}
"""Options of a trial on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """The mean over seeds with its standard error, NaN for one seed."""

    value: float
    stderr: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """The mean of some values."""
        spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(value=statistics.fmean(values), stderr=spread)

    def shown(self, scale: float = 1.0, digits: int = 4, *, sign: bool = False) -> str:
        """As text, times `scale`."""
        text = f"{self.value * scale:{'+' if sign else ''}.{digits}f}"
        return text if math.isnan(self.stderr) else f"{text} ± {self.stderr * scale:.{digits}f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table: a base and a recipe, over its seeds."""

    row: str
    group: str
    seeds: int
    start: Mean | None
    """Held-out loss of the problems before training."""
    loss: Mean
    """Held-out loss of the problems."""
    gap: Mean | None
    """Relative difference of that loss to the first line, seed by seed."""
    accuracy: Mean
    accuracy_stderr: float
    """Standard error of one seed's share, from the number of problems."""
    gsm8k: Mean | None
    """Held-out loss on GSM8K."""
    gsm8k_gap: Mean | None
    """Relative difference of that loss to the first line, seed by seed."""


def run(given: argparse.Namespace) -> None:
    """Write the table."""
    found = results(given.out / "cells")
    if not found:
        raise SystemExit(f"table: {given.out}/cells has no results. Fix: run `finetune` first.")
    lines = lines_of(found)
    to = given.to or given.out
    to.mkdir(parents=True, exist_ok=True)
    text = markdown(lines)
    (to / "accuracy.md").write_text(text)
    (to / "accuracy.json").write_text(json.dumps(found, indent=1) + "\n")
    (to / "accuracy.svg").write_text(picture(lines))
    print(text)


def results(place: Path) -> list[dict[str, Any]]:
    """The results of all cells that ended. `SystemExit` if they were trained with different settings."""
    found = [json.loads(file.read_text()) for file in sorted(place.glob("*.json"))]
    settings = {json.dumps(one["settings"], sort_keys=True) for one in found}
    if len(settings) > 1:
        raise SystemExit(f"table: cells were trained with different settings: {' and '.join(sorted(settings))}.")
    return found


def lines_of(found: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The lines, in the order of the groups."""
    by_row: dict[str, dict[int, Mapping[str, Any]]] = {}
    for one in found:
        by_row.setdefault(one["row"], {})[one["seed"]] = one
    first = by_row.get(FIRST, {})

    def gap(of: Mapping[int, Mapping[str, Any]], name: str) -> Mean | None:
        pairs = [(one[name]["loss"], first[s][name]["loss"]) for s, one in of.items() if s in first and name in one]
        return Mean.of([own / other - 1 for own, other in pairs]) if pairs and of is not first else None

    lines = []
    for row, of in by_row.items():
        all_of = list(of.values())
        starts = [one["start"] for one in all_of if one["start"] is not None]
        errors = [one["exact_match"]["stderr"] for one in all_of]
        on_gsm8k = [one["gsm8k"]["loss"] for one in all_of if "gsm8k" in one]
        lines.append(
            Line(
                row=row,
                group=all_of[0]["group"],
                seeds=len(of),
                start=Mean.of(starts) if starts else None,
                loss=Mean.of([one["problems"]["loss"] for one in all_of]),
                gap=gap(of, "problems"),
                accuracy=Mean.of([one["exact_match"]["share"] for one in all_of]),
                accuracy_stderr=statistics.fmean(errors),
                gsm8k=Mean.of(on_gsm8k) if on_gsm8k else None,
                gsm8k_gap=gap(of, "gsm8k"),
            )
        )
    return sorted(lines, key=lambda line: (ORDER.index(line.group), line.row != FIRST, line.row))


def markdown(lines: Sequence[Line]) -> str:
    """The table."""
    head = ["weights and recipe", "seeds", "loss before", "loss", "gap", "problems solved, %", "GSM8K loss", "gap"]
    text = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for line in lines:
        cells = [
            line.row,
            str(line.seeds),
            "" if line.start is None else f"{line.start.value:.4f}",
            line.loss.shown(),
            "" if line.gap is None else f"{line.gap.shown(100, 2, sign=True)} %",
            f"{line.accuracy.shown(100, 1)} (one seed ± {100 * line.accuracy_stderr:.1f})",
            "" if line.gsm8k is None else line.gsm8k.shown(),
            "" if line.gsm8k_gap is None else f"{line.gsm8k_gap.shown(100, 2, sign=True)} %",
        ]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


LEFT, WIDTH, STEP, TOP = 290, 320, 24, 40
STYLE = (
    "text{font:13px sans-serif;fill:#222}line{stroke:#bbb}.bar{stroke:#0b62a4;stroke-width:2}circle{fill:#0b62a4}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#555}.bar{stroke:#7db8e8}circle{fill:#7db8e8}}"
)


def picture(lines: Sequence[Line]) -> str:
    """Held-out loss and share of solved problems of each line, with standard errors, as SVG."""
    height = TOP + STEP * len(lines) + 30
    whole = LEFT + 2 * (WIDTH + 30)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {height}" role="img" '
        f'aria-label="Held-out loss and solved problems by base and recipe"><style>{STYLE}</style>'
    ]
    for number, line in enumerate(lines):
        parts.append(f'<text x="8" y="{TOP + STEP * number + 16}">{escape(line.row)}</text>')
    loss = [(line.loss.value, line.loss.stderr) for line in lines]
    solved = [(100 * line.accuracy.value, 100 * line.accuracy.stderr) for line in lines]
    for place, (title, values) in enumerate((("held-out loss", loss), ("problems solved, %", solved))):
        parts += _column(LEFT + place * (WIDTH + 30), title, values)
    return "".join([*parts, "</svg>\n"])


def _column(left: int, title: str, values: Sequence[tuple[float, float]]) -> list[str]:
    ends = [v + s * (0 if math.isnan(e) else e) for v, e in values for s in (-1, 1)]
    low, high = min(ends), max(ends)
    room = (high - low) * 0.08 or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room

    def at(value: float) -> float:
        return round(left + WIDTH * (value - low) / (high - low), 1)

    bottom = TOP + STEP * len(values)
    parts = [f'<text x="{left}" y="20">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        anchor = ("start", "middle", "end")[int(2 * share)]
        parts.append(f'<line x1="{at(value)}" y1="{TOP}" x2="{at(value)}" y2="{bottom}"/>')
        parts.append(f'<text x="{at(value)}" y="{bottom + 18}" text-anchor="{anchor}">{value:.4g}</text>')
    for number, (value, error) in enumerate(values):
        y = TOP + STEP * number + 12
        if not math.isnan(error):
            parts.append(f'<line class="bar" x1="{at(value - error)}" y1="{y}" x2="{at(value + error)}" y2="{y}"/>')
        parts.append(f'<circle cx="{at(value)}" cy="{y}" r="4"/>')
    return parts
