"""Charts as one standalone SVG file: no script, no outside asset, its own style."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from surogate_commands import palette
from surogate_commands.curves import HEIGHT, WIDTH, Curve, chart

STYLE = """
svg { font: 11px system-ui, sans-serif; } rect.back { fill: #fff; }
text { font-size: 11px; fill: #6b7280; } text.y { text-anchor: end; } text.x { text-anchor: middle; }
text.title { font-size: 13px; font-weight: 600; fill: #1f2937; }
polyline { fill: none; stroke-width: 1.5; } .grid { stroke: #e5e7eb; } .band { opacity: .13; }
""" + palette.line_styles(by_variable=False)
HEAD = 26
"""Height of a chart's title."""
KEY = 170
"""Width of a curve's name in the legend; a line has three names."""


def stacked(figures: Sequence[tuple[str, Sequence[Curve]]]) -> str:
    """The charts (title, curves), one under the other, below the names of the curves of the first.

    Curves of one place have one colour in all charts.
    """
    names = [curve.label for curve in figures[0][1]]
    lines = -(-len(names) // 3)
    keys = "".join(
        f'<line class="s{palette.style_of(i)}" stroke-width="2" x1="{50 + KEY * (i % 3)}" x2="{74 + KEY * (i % 3)}" '
        f'y1="{13 + 18 * (i // 3)}" y2="{13 + 18 * (i // 3)}"/>'
        f'<text x="{80 + KEY * (i % 3)}" y="{17 + 18 * (i // 3)}">{escape(name)}</text>'
        for i, name in enumerate(names)
    )
    parts, above = [], 18 * lines + 8
    for number, (title, curves) in enumerate(figures):
        inner = chart(title, curves)
        # A chart with nothing to draw has no picture; the swatches of a legend are pictures too, before it.
        body = inner[inner.rindex("<svg") : inner.rindex("</svg>")].partition(">")[2] if "<svg" in inner else ""
        top = above + HEAD + number * (HEIGHT + HEAD)
        parts.append(
            f'<text class="title" x="62" y="{top - 8}">{escape(title)}</text>'
            f'<g transform="translate(0 {top})">{body}</g>'
        )
    height = above + len(figures) * (HEIGHT + HEAD)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    back = f'<style>{STYLE}</style><rect class="back" width="{WIDTH}" height="{height}"/>'
    return f"{head}{back}{keys}{''.join(parts)}</svg>\n"
