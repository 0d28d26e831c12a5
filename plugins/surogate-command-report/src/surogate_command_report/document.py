"""The page that report and live page share: one document with its own style and script; nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from html import escape
from importlib import resources

from surogate_command_report.data import embedded, layout
from surogate_commands import palette

PURE, CHARTS, HEAT = "figures.js", "charts.js", "heat.js"
"""Scripts of both pages: functions without a document, the charts, and the heat maps."""


@cache
def style() -> str:
    """The style of both pages."""
    schemes = f":root {{ color-scheme: light dark; {palette.variables(dark=False)} }}\n"
    schemes += f"@media (prefers-color-scheme: dark) {{ :root {{ {palette.variables(dark=True)} }} }}\n"
    return schemes + palette.line_styles(by_variable=True) + "\n" + _read("page.css")


@cache
def script(last: str) -> str:
    """The scripts of both pages, then the one named `last`."""
    return '"use strict";\n' + "".join(_read(name) for name in (PURE, CHARTS, HEAT, last))


def live_page(nonce: str) -> str:
    """The live page. Its script asks for everything that is shown."""
    parts = {"TITLE": "Surogate", "POLICY": "", "NONCE": f' nonce="{nonce}"', "STYLE": style(), "CARD": _WAITING}
    return _filled({**parts, "SCRIPT": script("live.js"), "LAYOUT": embedded(layout()), "DATA": "null"})


def static_page(title: str, parts: Mapping[str, str], data: str) -> str:
    """A page that needs no server; `parts`: the HTML of CARD, TABLES, CURVES and DETAILS. `data` is JSON."""
    shown, program = style(), script("report.js")
    policy = f"default-src 'none'; style-src '{_digest(shown)}'; script-src '{_digest(program)}'; img-src data:"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    fixed = {"TITLE": escape(f"{title} · Surogate"), "POLICY": meta, "NONCE": "", "STYLE": shown}
    return _filled({**fixed, **parts, "SCRIPT": program, "LAYOUT": embedded(layout()), "DATA": data})


_WAITING = '<header id="card" class="card"><h1>Surogate</h1><p class="verdict">reading …</p></header>'


def _filled(parts: Mapping[str, str]) -> str:
    """The template with its marks replaced, all at once: a mark in a run's text stays what it is."""
    return re.sub(r"@([A-Z]+)@", lambda found: parts.get(found[1], ""), _read("page.html"))


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _read(name: str) -> str:
    return resources.files("surogate_command_report.page").joinpath(name).read_text(encoding="utf-8")
