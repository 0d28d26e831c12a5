"""Curves as inline SVG: no script, no outside asset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

POINTS = 1000
"""Most points of a curve; a longer one is thinned out."""

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 24

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

PHASE_COLOURS = {"converging": "#10b981", "plateau": "#f59e0b", "diverging": "#ef4444", "unstable": "#a855f7"}

LOG_RATIO = 200.0
"""Ratio of the largest to the smallest value, all positive, above which an axis is logarithmic."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line."""

    label: str
    points: Sequence[Point]
    """(x, y), x rising; where y is not finite the line is broken."""
    dots: bool = False
    """Also mark every point."""


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


def smoothed(values: NDArray[np.float64], keep: float) -> NDArray[np.float64]:
    """The exponential mean of the finite values up to each one, without bias to the first; NaN where none is.

    A value's weight falls by the factor `keep` (0 to 1, without 1) with each finite one that follows. The weights of
    each mean sum to 1, as in TensorBoard, so the first mean is the first value.
    """
    finite = np.isfinite(values)
    sums = values[finite] * (1.0 - keep)
    shift, factor = 1, keep
    # Each round doubles how far back the sums reach, until what is further back weighs less than rounding.
    while shift < len(sums) and factor > 1e-18:
        sums[shift:] = sums[shift:] + factor * sums[:-shift]
        shift, factor = 2 * shift, factor * factor
    means = np.full(len(values), np.nan)
    means[finite] = sums / (1.0 - keep ** np.arange(1, len(sums) + 1, dtype=np.float64))
    return means


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
    unit: str = "",
    from_zero: bool = False,
) -> str:
    """A figure with axes, or one that says that there is nothing to draw; `from_zero`: the values' axis begins at 0."""
    curves = [Curve(label=c.label, points=thinned(c.points), dots=c.dots) for c in curves]
    finite = [(x, y) for c in curves for x, y in c.points if math.isfinite(y)]
    if not finite:
        return f'{_head(title, unit)}<p class="none">nothing recorded</p></figure>'
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    log = not from_zero and min(ys) > 0 and max(ys) / min(ys) > LOG_RATIO
    y_low, y_high = _range([*ys, 0.0] if from_zero else ys, log=log)

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        height = math.log10(y) if log else y
        return HEIGHT - BOTTOM - (height - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for band in bands:
        begin, end = (across(min(max(x, x_low), x_high)) for x in (band.begin, band.end))
        colour = PHASE_COLOURS.get(band.label)
        if colour and end > begin:
            parts.append(
                f'<rect class="band" x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" '
                f'height="{HEIGHT - TOP - BOTTOM}" fill="{colour}"><title>{escape(band.label)}</title></rect>'
            )
    for height in _ticks(y_low, y_high):
        value = 10**height if log else height
        at = down(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{at + 4:.1f}">{figure(value)}</text>')
    for x in _ticks(x_low, x_high):
        parts.append(f'<text class="x" x="{across(x):.1f}" y="{HEIGHT - 6}">{figure(x)}</text>')
    for mark in marks:
        if x_low <= mark.at <= x_high:
            at = across(mark.at)
            parts.append(
                f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
                f"<title>{escape(mark.label)}</title></line>"
            )
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        for run in _unbroken(curve.points):
            path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in run)
            parts.append(f'<polyline points="{path}" stroke="{colour}"><title>{escape(curve.label)}</title></polyline>')
            if curve.dots or len(run) == 1:
                parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5" fill="{colour}"/>' for x, y in run]
    parts.append("</svg>")
    return _head(title, unit, log=log) + "".join(parts) + "</figure>"


def _head(title: str, unit: str, *, log: bool = False) -> str:
    text = f"{title}{f' ({unit})' if unit else ''}{', log scale' if log else ''}"
    return f"<figure><figcaption>{escape(text)}</figcaption>"


def legend(labels: Sequence[str]) -> str:
    """The runs' colours."""
    items = (
        f'<li><span style="background:{COLOURS[i % len(COLOURS)]}"></span>{escape(label)}</li>'
        for i, label in enumerate(labels)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def figure(value: float) -> str:
    """``1.2k``, ``0.003``, ``2e-05``: what fits beside an axis."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.1e}"


def _range(ys: Sequence[float], *, log: bool) -> tuple[float, float]:
    low, high = (math.log10(min(ys)), math.log10(max(ys))) if log else (min(ys), max(ys))
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    # A figure that is never negative has no axis below 0.
    return (low - margin if log or low < 0 else max(0.0, low - margin)), high + margin


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
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
