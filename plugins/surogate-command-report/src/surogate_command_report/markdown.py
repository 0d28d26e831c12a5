"""The report as Markdown: figures and tables, for a terminal, a pull request or a log."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_command_report import compare, contents
from surogate_command_report.card import card_of
from surogate_command_report.data import tables
from surogate_core.service.files import RunRecord


def render(runs: Sequence[RunRecord]) -> str:
    """The text of one run, or of several one after the other behind tables that compare them."""
    lines: list[str] = []
    if len(runs) > 1:
        card = card_of(runs)
        lines += [f"# {_flat(card.title)}", "", f"**{_flat(card.verdict)}**", ""]
        for section in tables(runs):
            lines += _section(section, level=2)
    shared = contents.shared_plugins(runs) if len(runs) > 1 else None
    for title, run in zip(compare.titles(runs), runs, strict=True):
        lines += _run(title, run, with_plugins=shared is None)
    if shared is not None:
        lines += _section(shared, level=1)
    return "\n".join(lines)


def _run(title: str, run: RunRecord, *, with_plugins: bool) -> list[str]:
    card = card_of([run])
    lines = [f"# {_flat(title)}", ""]
    lines += [_flat(card.subtitle), ""] if card.subtitle else []
    lines += [f"**{_flat(card.verdict)}**", ""]
    lines += [*_fenced(card.message, ""), ""] if card.message else []
    figures = [(name, f"{value} ({remark})" if remark else value) for name, value, remark in card.tiles]
    lines += _table(("", ""), [*figures, *card.places])
    for purpose, command in card.commands:
        lines += [f"To {purpose}:", "", *_fenced(command, "sh"), ""]
    header, course = contents.milestones(run)
    if course:
        lines += ["## Steps", "", *_table(header, course)]
    for section in contents.sections(run, with_plugins=with_plugins):
        lines += _section(section, level=2)
    return lines


def _section(section: contents.Section, *, level: int) -> list[str]:
    lines = [f"{'#' * level} {section.title}", ""]
    if section.text:
        return [*lines, *_fenced(section.text, "yaml"), ""]
    if section.items:
        return [*lines, *(f"- {_flat(item)}" for item in section.items), ""]
    if section.folded and not section.header:
        return [*lines, f"{_flat(', '.join(what for what, *_ in section.rows))}.", ""]
    return [*lines, *_table(section.header or ("", ""), section.rows)]


def _fenced(text: str, language: str) -> list[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{language}", text.rstrip("\n"), fence]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_flat(cell).replace("|", "\\|") for cell in cells) + " |"

    return [line(header), line(["---"] * len(header)), *(line(row) for row in rows), ""]


def _flat(text: str) -> str:
    """One line, and no HTML that a viewer would obey."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
