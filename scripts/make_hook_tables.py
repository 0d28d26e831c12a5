"""Write the field tables of docs/hooks.md from docstrings. With --check nothing is written: exit 1 if not current.

A table stands below the line ``<!-- fields: MODULE.CLASS -->``, and ends at the next empty line.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core.config.docs import field_docs  # noqa: E402
from surogate_core.config.schema import RunConfig  # noqa: E402

FILE = ROOT / "docs" / "hooks.md"

_TABLE = re.compile(r"(<!-- fields: ([\w.]+) -->\n)(?:\|[^\n]*\n)*")


def table(cls: type) -> str:
    """The fields of a dataclass as a Markdown table; those of a base class come first."""
    lines = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
    types, docs = _types(cls), _docs(cls)
    for field in dataclasses.fields(cls):
        # Settings are flat keys of the configuration, which says what they mean.
        meaning = docs.get(field.name) or field_docs(RunConfig).get(field.name, "")
        if not meaning:
            raise SystemExit(f"{cls.__module__}.{cls.__name__}.{field.name} has no docstring")
        cells = (f"`{field.name}`", f"`{types[field.name]}`", _default(field), meaning.replace("``", "`"))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        if isinstance(value, type):
            return f"`{value.__name__}`"
        return "a function" if callable(value) else f"`{value!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return ""


def _classes(cls: type) -> list[type]:
    return [c for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)]


def _docs(cls: type) -> dict[str, str]:
    return {name: text for one in _classes(cls) for name, text in field_docs(one).items()}


def _types(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in _classes(cls):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = ast.unparse(node.annotation)
    return found


def made(text: str) -> str:
    """The page with its tables as they must be."""

    def replace(found: re.Match[str]) -> str:
        module, _, name = found[2].rpartition(".")
        return found[1] + table(getattr(import_module(module), name))

    return _TABLE.sub(replace, text)


def main() -> int:
    """Write the tables, or check them."""
    text = FILE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        current = made(text) == text
        if not current:
            print("docs/hooks.md is not current; run: python scripts/make_hook_tables.py", file=sys.stderr)
        return 0 if current else 1
    FILE.write_text(made(text), encoding="utf-8")
    print("wrote docs/hooks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
