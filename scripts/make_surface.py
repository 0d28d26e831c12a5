"""Write docs/public-surface.md from `surogate_core.plugin`: its names, and what the docstrings say about them.

With --check nothing is written: exit 1 if the page is not current.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core import plugin  # noqa: E402
from surogate_core.lazy import offered_names  # noqa: E402

FILE = ROOT / "docs" / "public-surface.md"

HEAD = """# The public surface

<!-- Made by scripts/make_surface.py from surogate_core/plugin and docstrings; change those. -->

A plugin imports from one module:

```python
from surogate_core.plugin import UserError, bundles, hookimpl
```

{count} names are public, of which {modules} are modules; with the names of these modules {reached} can be reached.
There are at most 100 at one time. Everything else of `surogate_core` may change in any release. A test holds the
plugins of this repository, the templates of `surogate plugins new` and the examples of these pages to it. A name is
imported when it is first used, so the line above imports no torch.

## What may change, and when

| change | hook API |
| --- | --- |
| a new name, hook or event; a new field, argument or protocol member with a default | the same version |
| a name that will go away | version n deprecates it, version n + 1 has it, version n + 2 drops it |
| a hook, a field or a name that works differently | a new version, `surogate_core.API_VERSION` |

A plugin that needs an addition requires the core that has it, such as `surogate-core>=0.2`. With an older core it is
left out, and the message says what is missing and that the plugin needs a newer surogate-core.

A core serves two versions of the hook API: its own and the one before (version 1 was never released). A plugin states
what it was written for in `SUROGATE_API` ([plugins.md](plugins.md#the-hook-api)). A plugin that was written for the
version before is loaded, and named in one line on the screen, in the log and by `surogate doctor`. So is a plugin that
uses a deprecated name, which is found in its sources:

```text
plugin monitor-acme (distribution acme 1.2) uses printable of surogate_core.plugin, which hook API 4 drops
(this is 2): use shown
```

Protocols say what a plugin may rely on: a function that receives `bundles.RunKeys` may read the keys that the protocol
has, although the object has more. A plugin that hands such an object back to the core hands back the one that it got.

The distributions of this project whose names begin with `surogate-command-`, the conformance kit and
`surogate-reinforcement` are parts of the core that can be installed one by one. They import `surogate_core.service`
too, which may change in any release, and each of their versions requires the core of the same version.

## Names

"""


def make() -> str:
    """The page's text."""
    names = {name: getattr(plugin, name) for name in plugin.__all__}
    modules = {name: value for name, value in names.items() if isinstance(value, ModuleType)}
    inside = {name: public_names(value) for name, value in modules.items()}
    reached = len(names) - len(modules) + sum(map(len, inside.values()))
    head = HEAD.replace("{count}", str(len(names))).replace("{modules}", str(len(modules)))
    lines = [head.replace("{reached}", str(reached)) + "| name | what it is |", "| --- | --- |"]
    lines += [f"| `{name}` | {meaning_of(vars_of(plugin), name)} |" for name in names if name not in modules]
    lines += ["", "| module | what it has | names |", "| --- | --- | --- |"]
    for name, module in modules.items():
        lines.append(f"| `{name}` | {first_sentence(inspect.getdoc(module) or '')} | {len(inside[name])} |")
    for name in (n for n, module in modules.items() if module.__name__.startswith("surogate_core.plugin.")):
        home = vars_of(modules[name])
        lines += ["", f"### {name}", "", "| name | what it is |", "| --- | --- |"]
        lines += [f"| `{inner}` | {meaning_of(home, inner)} |" for inner in inside[name]]
    return "\n".join(lines) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """Names of a public module: its list of them, or what it defines without an underscore."""
    if "__all__" in vars(module):
        return sorted(module.__all__)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    found += [name for node in tree.body for name in assigned(node)]
    return sorted(name for name in found if not name.startswith("_"))


def assigned(node: ast.stmt) -> list[str]:
    """Names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def vars_of(module: ModuleType) -> dict[str, tuple[str, str]]:
    """Name → (module, name there) of what a lazy module offers."""
    return dict(offered_names(Path(str(module.__file__)).read_text(encoding="utf-8")))


def meaning_of(home: dict[str, tuple[str, str]], name: str) -> str:
    """The first sentence about a name, from its docstring or from the text below its assignment."""
    module, original = home[name]
    source = importlib.import_module(module)
    value = getattr(source, original)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return first_sentence(comment_on(source, original))
    return first_sentence(inspect.getdoc(value) or "")


def comment_on(module: ModuleType, name: str) -> str:
    """The text below the assignment of a name."""
    body = ast.parse(inspect.getsource(module)).body
    for node, below in pairwise(body):
        if name in assigned(node) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return str(below.value.value)
    inner = [n for n in body if isinstance(n, ast.ImportFrom) and name in {a.asname or a.name for a in n.names}]
    return comment_on(importlib.import_module(str(inner[0].module)), name) if inner else ""


def first_sentence(text: str) -> str:
    """Up to the first full stop, in one line, as a table's cell."""
    words = " ".join(textwrap.dedent(text).split()).replace("``", "`").replace("|", "\\|")
    sentence = words.partition(". ")[0].rstrip(".:")
    return sentence[:1].upper() + sentence[1:]


def main() -> None:
    page = make()
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if FILE.is_file() and FILE.read_text(encoding="utf-8") == page else 1)
    FILE.write_text(page, encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
