"""Write docs/hook-fields.md, the fields of what hooks return and receive, from docstrings.

With --check nothing is written: exit 1 if the page is not current.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core import bundles, events  # noqa: E402
from surogate_core.bundles import KINDS  # noqa: E402
from surogate_core.config.docs import field_docs  # noqa: E402
from surogate_core.config.schema import RunConfig  # noqa: E402
from surogate_core.data.encoded import EncodeContext, Encoded  # noqa: E402
from surogate_core.dsl.slots import TracedSlot  # noqa: E402

FILE = ROOT / "docs" / "hook-fields.md"

PARTS: dict[str, tuple[type, ...]] = {
    "objective": (bundles.Objective,),
    "dataset": (EncodeContext, Encoded),
    "recipe": (bundles.RecipeContext, TracedSlot),
    "optimizer": (bundles.ParamGroup,),
    "schedule": (bundles.ScheduleContext,),
    "kernels": (bundles.Kernel,),
    "task": (bundles.Part, bundles.OnlineContext),
    "policy_loss": (bundles.PolicyLoss, bundles.PolicyTerms, bundles.Lengths),
    "tool_parser": (bundles.ToolPart,),
    "environment": (bundles.EnvironmentProblem,),
    "fabric": (bundles.FabricContext,),
    "monitor": (events.Control, events.RunInfo),
}
"""Kind → the dataclasses that its bundle's functions receive or return."""

HEAD = """# Fields of the hooks' types

<!-- Made by scripts/make_hook_tables.py from the docstrings of surogate_core/bundles; change those. -->

What a hook returns, and what its functions receive. [hooks.md](hooks.md) says what each hook is for, with an example;
[metrics.md](metrics.md) has the fields of the events.
"""


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


def page() -> str:
    """The text of docs/hook-fields.md."""
    parts = [HEAD]
    for kind, (hook, bundle) in KINDS.items():
        parts.append(f"\n## {hook}\n")
        for cls in (bundle, *PARTS.get(kind, ())):
            parts.append(f"\n### {cls.__name__}\n\n{_text(cls)}\n\n{table(cls)}")
    return "".join(parts)


def _text(cls: type) -> str:
    paragraphs = (inspect.getdoc(cls) or "").replace("``", "`").split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(p.split()), 120) for p in paragraphs)


def main() -> int:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        current = FILE.is_file() and page() == FILE.read_text(encoding="utf-8")
        if not current:
            print("docs/hook-fields.md is not current; run: python scripts/make_hook_tables.py", file=sys.stderr)
        return 0 if current else 1
    FILE.write_text(page(), encoding="utf-8")
    print("wrote docs/hook-fields.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
