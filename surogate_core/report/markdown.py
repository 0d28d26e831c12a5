"""The report as Markdown: figures and tables, for a terminal, a pull request or a log."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.report import contents
from surogate_core.report.records import RunRecord


def render(runs: Sequence[RunRecord]) -> str:
    """The text of one run, or of several one after the other behind a table that compares them."""
    titles = contents.titles(runs)
    lines: list[str] = []
    if len(runs) > 1:
        lines += [f"# {len(runs)} runs", "", *_table(*contents.comparison(runs))]
    shared = contents.shared_plugins(runs)
    for title, run in zip(titles, runs, strict=True):
        lines += _run(title, run, with_plugins=shared is None)
    if shared is not None:
        lines += ["# Plugins of all runs", "", *(_table(contents.PLUGIN_HEADER, shared) if shared else ["None.", ""])]
    return "\n".join(lines)


def _run(title: str, run: RunRecord, *, with_plugins: bool) -> list[str]:
    lines = [f"# {_flat(title)}", "", *_table(("", ""), contents.summary(run))]
    sections = [
        ("Course", ("step", "loss", "lr", "gradient norm", "tokens/s"), contents.milestones(run)),
        ("Advice", ("step", "seen", "key", "change", "evidence"), contents.advice(run)),
        ("Phases", ("step", "phase", "before", "improvement"), contents.phases(run)),
        ("Data", ("", ""), contents.data(run)),
    ]
    if with_plugins:
        sections.append(("Plugins", contents.PLUGIN_HEADER, contents.plugins(run)))
    for name, header, rows in sections:
        lines += [f"## {name}", "", *(_table(header, rows) if rows else ["None.", ""])]
    if notes := contents.notices(run):
        lines += ["## Notes", "", *(f"- {_flat(note)}" for note in notes), ""]
    fence = "```"
    while fence in run.config_text:
        fence += "`"
    return [*lines, "## Configuration", "", f"{fence}yaml", run.config_text.rstrip("\n"), fence, ""]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_flat(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *(line(row) for row in rows), ""]


def _flat(text: str) -> str:
    """One line, and no HTML that a viewer would obey."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
