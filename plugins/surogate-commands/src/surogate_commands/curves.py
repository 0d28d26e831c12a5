"""Curves as inline SVG: no script, no outside asset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from surogate_commands import palette
from surogate_core.plugin import significant

if TYPE_CHECKING:
    from numpy.typing import NDArray

POINTS = 1000
"""Most points of a curve; a longer one is thinned out."""

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 24

COLUMNS = 40
"""Stretches of a chart that have a tooltip each."""

LOG_RATIO = 200.0
"""Ratio of the largest to the smallest value, all positive, above which an axis is logarithmic by itself."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line."""

    label: str
    points: Sequence[Point]
    """(x, y), x rising; where y is not finite the line is broken."""
    dots: bool = False
    """Also mark every point."""
    style: int | None = None
    """Place in the palette; None: the place among the chart's curves."""
    pale: bool = False
    """Drawn pale, as the raw values behind their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A stretch of x with a meaning."""

    begin: float
    end: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A moment with a meaning."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where values are in the picture."""

    left: float
    right: float
    bottom: float
    """The logarithm to base 10 where `log` is true, and likewise `top`."""
    top: float
    log: bool

    def across(self, x: float) -> float:
        return LEFT + (x - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def down(self, y: float) -> float:
        height = math.log10(y) if self.log else y
        return HEIGHT - BOTTOM - (height - self.bottom) / (self.top - self.bottom) * (HEIGHT - TOP - BOTTOM)


def kept_places(heights: NDArray[np.float64], limit: int = POINTS) -> NDArray[np.int64]:
    """Indices of the at most `limit` values that a curve keeps, in ascending order.

    Each of `limit` // 2 intervals keeps its lowest and its highest value, so no spike is lost. The first and the last
    value are kept too. A value that is not finite counts as the highest.
    """
    count = len(heights)
    if count <= limit:
        return np.arange(count)
    inner, stretches = np.where(np.isfinite(heights[1:-1]), heights[1:-1], np.inf), limit // 2 - 1
    kept = [0, count - 1]
    borders = np.arange(stretches + 1) * len(inner) // stretches
    for begin, end in pairwise(borders.tolist()):
        part = inner[begin:end]
        kept += [1 + begin + int(part.argmin()), 1 + begin + int(part.argmax())]
    return np.unique(kept)


def thinned(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most `limit` of the points, as `kept_places` chooses them."""
    return [points[place] for place in kept_places(np.array([y for _, y in points], np.float64), limit)]


def smoothed(values: NDArray[np.float64], keep: float, places: NDArray[np.int64]) -> NDArray[np.float64]:
    """The exponential mean of the finite values up to each of the places, without bias to the first; NaN without any.

    A value's weight falls by the factor `keep` (above 0, below 1) with each finite one that follows. The weights of
    each mean sum to 1, as in TensorBoard, so the first mean is the first value.
    """
    finite = np.isfinite(values)
    if not finite.all():
        # Where each place is among the finite values.
        places = np.where(finite[places], np.cumsum(finite)[places] - 1, -1)
        values = values[finite]
    # What is further back weighs less than rounding.
    reach = min(len(values), math.ceil(math.log(1e-18) / math.log(keep)))
    weights = (1.0 - keep) * keep ** np.arange(reach, dtype=np.float64)[::-1]
    means = np.full(len(places), np.nan)
    for number, place in enumerate(places.tolist()):
        if place >= 0:
            part = values[max(0, place + 1 - reach) : place + 1]
            means[number] = part @ weights[reach - len(part) :] / (1.0 - keep ** (place + 1))
    return means


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
    unit: str = "",
    from_zero: bool = False,
    log: bool | None = None,
    tips: bool = False,
) -> str:
    """A figure with axes, or one that says that there is nothing to draw.

    `from_zero`: the axis of the values begins at 0. `log`: whether it is logarithmic; None decides by their range.
    `tips`: stretches of the picture have the values there as tooltips.
    """
    curves = [
        replace(c, points=thinned(c.points), style=palette.style_of(place if c.style is None else c.style))
        for place, c in enumerate(curves)
    ]
    if log:
        curves = [replace(c, points=[(x, y if y > 0 else math.nan) for x, y in c.points]) for c in curves]
    head = f"<figure><figcaption>{escape(f'{title} ({unit})' if unit else title)}"
    frame = _frame(curves, from_zero=from_zero, log=log)
    if frame is None:
        return f'{head}</figcaption><p class="none">nothing recorded</p></figure>'
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += [*_bands(bands, frame), *_axes(frame), *_marks(marks, frame), *_lines(curves, frame)]
    parts += _tips(curves, frame) if tips else []
    entries = [(c.label, c.style or 0, c.dots) for c in curves if c.label and not c.pale and c.points]
    key = legend(entries, list(dict.fromkeys(band.label for band in bands if band.label in palette.PHASES)))
    scale = ", log scale" if frame.log else ""
    return f"{head}{scale}</figcaption>{key}{''.join(parts)}</svg></figure>"


def _frame(curves: Sequence[Curve], *, from_zero: bool, log: bool | None) -> _Frame | None:
    finite = [(x, y) for c in curves for x, y in c.points if math.isfinite(y)]
    if not finite:
        return None
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    left, right = min(xs), max(xs)
    if left == right:
        left, right = left - 1, right + 1
    if log is None:
        log = not from_zero and min(ys) > 0 and max(ys) / min(ys) > LOG_RATIO
    bottom, top = _range([*ys, 0.0] if from_zero else ys, log=log)
    return _Frame(left=left, right=right, bottom=bottom, top=top, log=log)


def _bands(bands: Sequence[Band], frame: _Frame) -> Iterable[str]:
    for band in bands:
        begin, end = (frame.across(min(max(x, frame.left), frame.right)) for x in (band.begin, band.end))
        colour = palette.PHASES.get(band.label)
        if colour and end > begin:
            yield (
                f'<rect class="band" x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}" fill="{colour}"><title>{escape(band.label)}</title></rect>'
            )


def _axes(frame: _Frame) -> Iterable[str]:
    for height in ticks(frame.bottom, frame.top):
        value = 10**height if frame.log else height
        at = frame.down(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="y" x="{LEFT - 6}" y="{at + 4:.1f}">{figure(value)}</text>'
    for x in ticks(frame.left, frame.right):
        yield f'<text class="x" x="{frame.across(x):.1f}" y="{HEIGHT - 6}">{figure(x)}</text>'


def _marks(marks: Sequence[Mark], frame: _Frame) -> Iterable[str]:
    for mark in marks:
        if frame.left <= mark.at <= frame.right:
            at = frame.across(mark.at)
            yield (
                f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{escape(mark.label)}</title></line>"
            )


def _lines(curves: Sequence[Curve], frame: _Frame) -> Iterable[str]:
    for curve in curves:
        for run in _unbroken(curve.points):
            path = " ".join(f"{frame.across(x):.1f},{frame.down(y):.1f}" for x, y in run)
            pale = " raw" if curve.pale else ""
            yield f'<polyline class="s{curve.style}{pale}" points="{path}"/>'
            if curve.dots or len(run) == 1:
                for x, y in run:
                    at = f'cx="{frame.across(x):.1f}" cy="{frame.down(y):.1f}"'
                    yield f'<circle class="d{curve.style}{pale}" {at} r="3"/>'


def _tips(curves: Sequence[Curve], frame: _Frame) -> Iterable[str]:
    """Columns that cannot be seen, with the values nearest to their middle as tooltips."""
    width, steps = (WIDTH - LEFT - RIGHT) / COLUMNS, (frame.right - frame.left) / COLUMNS
    for place in range(COLUMNS):
        middle = frame.left + (place + 0.5) * steps
        said = []
        for curve in curves:
            x, y = min(curve.points, key=lambda point: abs(point[0] - middle), default=(math.inf, math.nan))
            if math.isfinite(y) and (curve.dots or abs(x - middle) <= max(steps, 1.0)):
                said.append(f"{curve.label}{' raw' if curve.pale else ''} {figure(y)} (step {x:,.0f})".strip())
        if said:
            yield (
                f'<rect class="tip" x="{LEFT + place * width:.1f}" y="{TOP}" width="{width:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join(said))}</title></rect>'
            )


def legend(entries: Sequence[tuple[str, int, bool]], shades: Sequence[str] = ()) -> str:
    """The names beside samples of their lines: (name, style, whether the line has dots); then those of phases."""
    items = [
        f'<li><svg class="swatch" viewBox="0 0 26 10" aria-hidden="true"><line class="s{style}" x1="1" x2="25" y1="5" '
        f'y2="5"/>{f"""<circle class="d{style}" cx="13" cy="5" r="3"/>""" if dots else ""}</svg>{escape(label)}</li>'
        for label, style, dots in entries
    ]
    items += [
        f'<li><svg class="shade" viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" rx="2" '
        f'fill="{palette.PHASES[phase]}" opacity="0.45"/></svg>{escape(phase)}</li>'
        for phase in shades
    ]
    return f'<ul class="key">{"".join(items)}</ul>' if items else ""


def figure(value: float) -> str:
    """``1.2k``, ``0.003``, ``2e-05``: what fits beside an axis."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return significant(value, 4).replace(",", "") if size >= 1e-3 else f"{value:.1e}"


def _range(ys: Sequence[float], *, log: bool) -> tuple[float, float]:
    low, high = (math.log10(min(ys)), math.log10(max(ys))) if log else (min(ys), max(ys))
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    # A figure that is never negative has no axis below 0.
    return (low - margin if log or low < 0 else max(0.0, low - margin)), high + margin


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values between the bounds, about `count` of them."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / width)
    return [number * width for number in range(first, math.floor(high / width) + 1)]


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
