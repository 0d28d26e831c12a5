"""The report as one HTML file: readable without a script, with values and switches where scripts run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from surogate_command_report import charts, compare, contents, heat
from surogate_command_report.card import Card, card_of
from surogate_command_report.data import embedded, experts, figures, tables
from surogate_command_report.document import static_page
from surogate_commands.curves import Curve, chart, legend
from surogate_core.service.files import RunRecord

SVG_POINTS = 400
"""Most points of a curve in the pictures that are shown without a script."""


def render(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several with their curves overlaid."""
    card = card_of(runs)
    parts = {
        "CARD": _card(card),
        "TABLES": "".join(_section(section) for section in tables(runs)),
        "CURVES": "".join([*_curves(runs), *(heat.figures(runs[0].loads) if len(runs) == 1 else ())]),
        "DETAILS": "".join(_details(runs)),
    }
    shown = figures(runs, smooth=contents.SMOOTH)
    return static_page(
        card.title, parts, embedded({"runs": shown["runs"], "charts": shown["charts"], "experts": experts(runs)})
    )


def _card(card: Card) -> str:
    parts = [f"<h1>{escape(card.title)}</h1>"]
    parts += [f'<p class="subtitle">{escape(card.subtitle)}</p>'] if card.subtitle else []
    parts.append(f'<p class="verdict">{escape(card.verdict)}</p>')
    message = f'<pre class="message" tabindex="0">{escape(card.message)}</pre>' if card.message else ""
    if card.tone != "good":
        parts.append(message)
    if card.tiles:
        cells = "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f' <small>{escape(remark)}</small>' if remark else ''}"
            "</dd></div>"
            for name, value, remark in card.tiles
        )
        parts.append(f'<dl class="tiles">{cells}</dl>')
    lines = [(what, path) for what, path in card.places] + [(what, command) for what, command in card.commands]
    if lines:
        rows = "".join(
            f"<div><dt>{escape(what)}</dt><dd><code>{escape(text)}</code></dd></div>" for what, text in lines
        )
        parts.append(f'<dl class="places">{rows}</dl>')
    if card.tone == "good":
        parts.append(message)
    return f'<header id="card" class="card {card.tone}">{"".join(parts)}</header>'


def _curves(runs: Sequence[RunRecord]) -> Iterable[str]:
    if len(runs) > 1:
        yield legend([(title, place, False) for place, title in enumerate(compare.titles(runs))])
    for number, shown in enumerate(charts.charts_of(runs)):
        # The first chart of a run shows its phases and where advice was given.
        first = number == 0 and len(runs) == 1
        curves = [curve for place, run in enumerate(runs) for curve in _lines(run, shown, place, single=len(runs) == 1)]
        yield chart(
            shown.title,
            curves,
            unit=shown.unit,
            from_zero=shown.zero,
            bands=contents.bands(runs[0]) if first else (),
            marks=contents.marks(runs[0]) if first else (),
            log=False,
            tips=True,
        )


def _lines(run: RunRecord, shown: charts.Chart, place: int, *, single: bool) -> Iterable[Curve]:
    """A run's lines of a chart: the values, or pale values behind their mean."""
    several = single and (len(shown.lines) > 1 or shown.lines[0].series == "loss")
    for number, line in enumerate(shown.lines):
        style = place
        if single:
            style = number if line.style is None else line.style
        label, points = line.label if several else "", charts.points_of(run, line.series, limit=SVG_POINTS)
        if line.dots or not charts.smooths(line.series):
            yield Curve(label=label, points=points, dots=line.dots, style=style)
            continue
        means = charts.points_of(run, line.series, smooth=contents.SMOOTH, limit=SVG_POINTS)
        yield Curve(label=label, points=points, style=style, pale=True)
        of_means = sum(charts.smooths(other.series) and not other.dots for other in shown.lines)
        name = f"{label}, smoothed" if label and of_means == 1 else label
        yield Curve(label=name, points=means, style=style)


def _details(runs: Sequence[RunRecord]) -> Iterable[str]:
    shared = contents.shared_plugins(runs) if len(runs) > 1 else None
    for title, run in zip(compare.titles(runs), runs, strict=True):
        parts = contents.sections(run, with_plugins=shared is None)
        if len(runs) == 1:
            yield from map(_section, parts)
        else:
            inner = "".join(_section(part, level=3) for part in parts)
            yield f'<details class="run"><summary>{escape(title)}</summary>{inner}</details>'
    if shared is not None:
        yield _section(shared)


def _section(section: contents.Section, *, level: int = 2) -> str:
    body = f'<pre tabindex="0">{escape(section.text)}</pre>' if section.text else ""
    if section.items:
        body = f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in section.items)}</ul>"
    if section.rows:
        body = _table(section.header, section.rows)
    title = escape(section.title)
    if section.folded:
        return f"<details><summary>{title}</summary>{body}</details>"
    return f"<section><h{level}>{title}</h{level}>{body}</section>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    if not header:
        # Facts, (what, value): their text breaks, so that the values stay in sight.
        lines = (
            f'<tr><th scope="row">{escape(what)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
            for what, *cells in rows
        )
        return f'<table class="facts">{"".join(lines)}</table>'
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = (
        "".join(f'<td data-head="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(header, row, strict=True))
        for row in rows
    )
    body = "".join(f'<tr class="row">{line}</tr>' for line in lines)
    return f'<div class="wide" tabindex="0"><table><tr class="head">{head}</tr>{body}</table></div>'
