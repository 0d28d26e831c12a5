"""Colours and line styles of curves, made from the palette of Okabe and Ito, which colour-blind readers can tell apart.

Each colour has at least 3:1 contrast to its background, each text colour 4.5:1. Lines differ in their dashes too.
"""

from __future__ import annotations

LIGHT = ("#0072B2", "#D55E00", "#009E73", "#A6518A", "#8C6D00", "#333333", "#2A8FCB", "#7A3B00")
"""Colours of curves on a light background."""
DARK = ("#56B4E9", "#E69F00", "#1FC295", "#E08DBD", "#F0E442", "#E5E7EB", "#8FA8FF", "#FF8A5C")
"""The same on a dark background."""
DASHES = ("", "7 4", "2 3", "10 3 2 3", "14 4", "5 2", "3 6", "12 3 4 3")
"""Dash pattern of each curve, as in SVG; the first is solid."""

PHASES = {"converging": "#10b981", "plateau": "#f59e0b", "diverging": "#ef4444", "unstable": "#a855f7"}
"""Phase → colour of its shade; a phase that is not listed has none."""

HEAT = {"low": "#3B82C4", "high": "#D9730D", "none": "#6B7280"}
"""Colours of a heat map on both pages: below the mean and above it, the more opaque the farther, and of no token."""
HEAT_SPAN = 3
"""Powers of 2 from the mean to the opaque colours."""

LIGHT_PAGE = {"ink": "#1f2937", "pale": "#5b6472", "line": "#d7dbe2", "back": "#ffffff", "box": "#f6f7f9"}
DARK_PAGE = {"ink": "#e5e7eb", "pale": "#a3adbb", "line": "#374151", "back": "#111827", "box": "#1c2533"}
LIGHT_TONES = {"good": "#046c4e", "bad": "#b91c1c", "busy": "#075985", "advice": "#b45309"}
DARK_TONES = {"good": "#34d399", "bad": "#fca5a5", "busy": "#7dd3fc", "advice": "#fbbf24"}


def style_of(place: int) -> int:
    """The style of the curve at this place; styles repeat after the last."""
    return place % len(LIGHT)


def variables(*, dark: bool) -> str:
    """The colours as CSS variables: ``--c0`` to ``--c7``, and those of the page."""
    colours, page = (DARK, {**DARK_PAGE, **DARK_TONES}) if dark else (LIGHT, {**LIGHT_PAGE, **LIGHT_TONES})
    named = {f"c{place}": colour for place, colour in enumerate(colours)} | page
    return " ".join(f"--{name}: {value};" for name, value in named.items())


def line_styles(*, by_variable: bool) -> str:
    """CSS of the classes ``s0`` to ``s7`` of lines and ``d0`` to ``d7`` of dots; else with the light colours."""
    lines = []
    for place, colour in enumerate(LIGHT):
        shown = f"var(--c{place})" if by_variable else colour
        dash = f" stroke-dasharray: {DASHES[place]};" if DASHES[place] else ""
        lines.append(f".s{place} {{ stroke: {shown};{dash} }} .d{place} {{ fill: {shown}; }}")
    return "\n".join(lines)
