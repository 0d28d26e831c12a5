"""What the scripts of the live page and of the report read: curves, heads and tables as plain JSON values."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_command_report import charts, compare, contents, heat
from surogate_command_report.card import card_of
from surogate_commands import palette
from surogate_commands.curves import POINTS, kept_places, smoothed
from surogate_core.service.files import RunRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

AXES = ("step", "tokens", "time")
"""What the curves may be drawn over."""

AXIS_POINTS = 200
"""Points of a run's tokens and time by step, between which the scripts interpolate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The part of the curves that a request asks for."""

    begin: float
    end: float
    smooth: float
    axis: str


def figures(
    runs: Sequence[RunRecord],
    *,
    begin: float = -math.inf,
    end: float = math.inf,
    smooth: float = 0.0,
    axis: str = "step",
) -> dict[str, Any]:
    """The changing part of the page: the head, curves with at most `POINTS` points each, phases and advice.

    `begin` and `end` are places on `axis`, one of `AXES`. The head is that of the whole run. Where `smooth` (0 to
    0.999) is not 0, the curves of `charts.smooths` have a third list, of means over all steps of the run.
    """
    part = _Part(begin=begin, end=end, smooth=smooth, axis=axis)
    found = [_figures(title, run, part) for title, run in zip(compare.titles(runs), runs, strict=True)]
    return {
        "runs": found,
        "charts": shown_charts(runs),
        "card": dataclasses.asdict(card_of(runs)) if runs else None,
        "tables": [dataclasses.asdict(table) for table in tables(runs)],
    }


def _figures(title: str, run: RunRecord, part: _Part) -> dict[str, Any]:
    steps, evaluated = run.steps, run.curve("eval")[0]
    last = int(steps[-1]) if len(steps) else 0
    all_series = [*charts.FIXED_SERIES, *run.names]
    begin, end = _steps_between(run, part)
    return {
        "title": title,
        "over": run.end is not None,
        "step": last,
        "range": [min(int(s[0]) for s in (steps, evaluated) if len(s)), last] if len(steps) else [0, last],
        "recorded": [series for series in all_series if charts.recorded(run, series)],
        "axes": _axes(run, begin, end),
        "curves": {series: _points(run, series, begin, end, part.smooth) for series in all_series},
        "bands": [[band.begin, band.end, band.label] for band in contents.bands(run)],
        "marks": [mark.at for mark in contents.marks(run)],
        "loads": [len(run.loads.columns), run.loads.columns[-1].last] if run.loads.columns else [],
        "revision": [str(run.start.get("time")), len(run.config_text), len(run.facts), run.outcome]
        + [len(found) for found in (run.advice, run.phases, run.notices, run.samples, evaluated)]
        + [str(one.get("step")) for one in run.completions[-1:]],
    }


def shown_charts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The charts of these runs: title, unit, lines, and how their axes are."""
    return [
        {
            "title": chart.title,
            "unit": chart.unit,
            "zero": chart.zero,
            "log": chart.log,
            "lines": [
                {"series": one.series, "label": one.label, "dots": one.dots, "style": _style(one, place)}
                for place, one in enumerate(chart.lines)
            ],
        }
        for chart in charts.charts_of(runs)
    ]


def _style(line: charts.Line, place: int) -> int:
    return palette.style_of(place if line.style is None else line.style)


def texts(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The slowly changing part of the page: each run's sections."""
    shared = contents.shared_plugins(runs) if len(runs) > 1 else None
    parts = [contents.sections(run, with_plugins=shared is None) for run in runs]
    return {
        "runs": [[dataclasses.asdict(section) for section in sections] for sections in parts],
        "shared": [dataclasses.asdict(shared)] if shared else [],
    }


def experts(runs: Sequence[RunRecord]) -> dict[str, Any] | None:
    """What the heat maps of one run's experts are drawn from; None for several runs, and without a record."""
    return runs[0].loads.data() if len(runs) == 1 else None


def tables(runs: Sequence[RunRecord]) -> list[contents.Section]:
    """The tables that compare several runs; none for one run."""
    if len(runs) < 2:
        return []
    (head, rows), (keys, values) = compare.table(runs), compare.differences(runs)
    found = [contents.Section(title="Runs", header=head, rows=rows)]
    if values:
        found.append(contents.Section(title="Configuration: what differs", header=keys, rows=values))
    return found


def layout() -> dict[str, Any]:
    """The constants of the scripts: line styles and phases."""
    return {
        "dashes": [[int(length) for length in dash.split()] for dash in palette.DASHES],
        "phases": palette.PHASES,
        "smooth": contents.SMOOTH,
        "heat": {**palette.HEAT, "span": palette.HEAT_SPAN, "layers": heat.LAYERS, "experts": heat.EXPERTS},
    }


def embedded(value: Any) -> str:
    """JSON that can be put into a script element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _axes(run: RunRecord, begin: float, end: float) -> dict[str, list[float | None]]:
    """Steps, and the tokens and seconds at each of them, from 0 at the start of the first step."""
    steps = run.steps
    low, high = _around(steps, begin, end)
    places = np.linspace(low, high - 1, min(AXIS_POINTS, max(0, high - low))).round().astype(np.int64)
    found: dict[str, list[float | None]] = {}
    for axis in AXES:
        values = steps[places] if axis == "step" else run.along(axis)[places]
        found[axis] = [_plain(v, 9) for v in values.tolist()]
        if len(places) and places[0] == 0:
            found[axis].insert(0, max(0.0, float(steps[0]) - 1) if axis == "step" else 0.0)
    return found


def _steps_between(run: RunRecord, part: _Part) -> tuple[float, float]:
    """The steps at the ends of the part."""
    if part.axis == "step" or not len(run.steps):
        return part.begin, part.end
    along, steps = run.along(part.axis), run.steps
    first = int(np.searchsorted(along, part.begin))
    stop = int(np.searchsorted(along, part.end, side="right"))
    begin = -math.inf if first == 0 else float(steps[min(first, len(steps) - 1)])
    return begin, math.inf if stop >= len(steps) else float(steps[max(0, stop - 1)])


def _points(run: RunRecord, series: str, low: float, high: float, smooth: float) -> list[list[Any]]:
    """[steps, values], and the means where they are asked for."""
    steps, values = run.curve(series)
    begin, end = _around(steps, low, high)
    places = begin + kept_places(values[begin:end], POINTS)
    scale = charts.SCALES.get(series, 1.0)
    shown = [values[places]]
    if smooth and charts.smooths(series):
        shown.append(smoothed(values, smooth, places))
    return [steps[places].tolist(), *([_plain(v * scale) for v in column.tolist()] for column in shown)]


def _around(steps: NDArray[np.int64], low: float, high: float) -> tuple[int, int]:
    """The rows between two steps, and one more on each side, so that lines lead out of the picture."""
    # In whole numbers: a float would have numpy convert all steps.
    least, most = (max(-(2**62), min(2**62, bound)) for bound in (low, high))
    first = int(np.searchsorted(steps, math.ceil(least)))
    stop = int(np.searchsorted(steps, math.floor(most), side="right"))
    return max(0, first - 1), min(len(steps), stop + 1)


def _plain(value: float, digits: int = 6) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
