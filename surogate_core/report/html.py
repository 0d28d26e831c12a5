"""The report as one HTML file: inline SVG and CSS, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from surogate_core.report import contents
from surogate_core.report.curves import Curve, chart, legend
from surogate_core.report.records import RunRecord

STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --pale: #6b7280; --line: #e5e7eb; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --pale: #9ca3af; --line: #374151; --back: #111827; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
       max-width: 1360px; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h1, li { overflow-wrap: anywhere; } h2 { margin-top: 2rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--pale); } text.y { text-anchor: end; } text.x { text-anchor: middle; }
polyline { fill: none; stroke-width: 1.4; stroke-linejoin: round; } .grid { stroke: var(--line); }
.band { opacity: .13; } .mark { stroke: #d97706; stroke-width: 1.5; stroke-dasharray: 4 3; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: break-word; }
table.facts { display: table; max-width: 100%; } .facts td:last-child { overflow-wrap: anywhere; }
.facts td:first-child { max-width: 55vw; }
.none, .pale { color: var(--pale); } pre { overflow: auto; background: color-mix(in srgb, var(--pale) 12%, transparent);
  padding: 1rem; border-radius: 8px; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 1rem; }
.legend span { display: inline-block; width: .8rem; height: .8rem; border-radius: 3px; margin-right: .4rem; }
@media (max-width: 560px) { svg { overflow: visible; } svg text { font-size: 17px; } }
@media (max-width: 560px) { /* a row of several columns becomes a card, so that no value is out of sight */
  table:not(.facts) { display: block; } tr.head { display: none; }
  tr.row { display: block; border-bottom: 1px solid var(--line); padding: .3rem 0; }
  tr.row td { display: block; border: 0; padding: 0; overflow-wrap: anywhere; }
  tr.row td::before { content: attr(data-head) ": "; color: var(--pale); }
}
"""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(runs: Sequence[RunRecord]) -> str:
    """The page of one run, or of several with their curves overlaid."""
    titles = contents.titles(runs)
    heading = titles[0] if len(runs) == 1 else f"{len(runs)} runs"
    body = [f"<h1>{escape(heading)}</h1>"]
    if len(runs) > 1:
        body += [_table(*contents.comparison(runs)), legend(titles)]
    body += _curves(runs, titles)
    shared = contents.shared_plugins(runs)
    for title, run in zip(titles, runs, strict=True):
        if len(runs) > 1:
            body.append(f"<h1>{escape(title)}</h1>")
        body += _details(run, with_plugins=shared is None)
    if shared is not None:
        body += ["<h1>Plugins of all runs</h1>", _table(contents.PLUGIN_HEADER, shared)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)} · Surogate</title><style>{STYLE}</style></head>\n"
        f"<body>{''.join(f'{part}{chr(10)}' for part in body)}</body></html>\n"
    )


def _curves(runs: Sequence[RunRecord], titles: Sequence[str]) -> list[str]:
    shown = contents.shown_curves(runs)
    if not shown:
        return ['<p class="none">No step was recorded.</p>']
    key = "x is the step."
    if len(runs) == 1:
        key += " Shaded: green converging, yellow plateau, red diverging, violet unstable. Dashed: advice."
    figures = (_curve(runs, titles, *curve) for curve in shown)
    return [f'<p class="pale">{key}</p>', '<div class="curves">', *figures, "</div>"]


def _curve(runs: Sequence[RunRecord], titles: Sequence[str], title: str, series: str, unit: str) -> str:
    curves = [
        Curve(label=label, points=contents.points_of(run, series), dots=series == "eval")
        for label, run in zip(titles, runs, strict=True)
    ]
    from_zero = series in contents.FROM_ZERO
    if len(runs) > 1:
        return chart(title, curves, unit=unit, from_zero=from_zero)
    (run,) = runs
    return chart(title, curves, unit=unit, from_zero=from_zero, bands=contents.bands(run), marks=contents.marks(run))


def _details(run: RunRecord, *, with_plugins: bool) -> list[str]:
    parts = ["<h2>Summary</h2>", _table((), contents.summary(run))]
    sections = [
        ("Advice", ("step", "seen", "key", "change", "evidence"), contents.advice(run)),
        ("Phases", ("step", "phase", "before", "improvement"), contents.phases(run)),
        ("Data", (), contents.data(run)),
    ]
    if with_plugins:
        sections.append(("Plugins", contents.PLUGIN_HEADER, contents.plugins(run)))
    for title, header, rows in sections:
        parts += [f"<h2>{title}</h2>", _table(header, rows)]
    if notes := contents.notices(run):
        parts += ["<h2>Notes</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes), "</ul>"]
    parts += ["<h2>Configuration</h2>", f"<details><summary>config.yaml</summary><pre>{escape(run.config_text)}</pre>"]
    return [*parts, "</details>"]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    if not rows:
        return '<p class="none">none</p>'
    if not header:
        # Facts, (what, value): their text breaks, so that the values stay in sight.
        lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        return f'<table class="facts">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = (
        "".join(f'<td data-head="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(header, row, strict=True))
        for row in rows
    )
    return f'<table><tr class="head">{head}</tr>{"".join(f"<tr class=row>{line}</tr>" for line in lines)}</table>'
