"""The static view of a plugin: its offers, read from its files without importing it.

Hooks are the functions decorated with ``hookimpl``; config options are the files
``conf/<group>/<name>.yaml``; bundle names are those written as text in the calls that make
bundles (``Recipe(name="bf16", …)``), and flat keys those in ``Flat("lion_beta1")`` and ``flag="qlora_bnb"``, so what is
computed is not seen.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticView:
    """The facts about a plugin that its files show without an import."""

    hooks: tuple[str, ...] = ()
    options: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    """(config group, option) → its file."""
    bundles: tuple[tuple[str, str], ...] = ()
    """(kind, name)."""
    flat_keys: frozenset[str] = frozenset()
    """Flat keys of its options, and those that choose a weight format."""
    config_dir: Path | None = None
    api: str | None = None
    """`SUROGATE_API` of the module, or None where it states none."""
    problem: str = ""
    """Why there is nothing to see, or empty."""

    def offers(self, group: str, name: str) -> bool:
        """Whether a config option or a bundle of that name is offered."""
        return (group, name) in self.options or (group, name) in self.bundles


@cache
def static_view(module: str) -> StaticView:
    """Look at the module that an entry point's value names (``package.module`` or ``package.module:object``)."""
    name = module.partition(":")[0].strip()
    package = locate(name.partition(".")[0])
    file = module_file(name)
    if package is None or file is None:
        return StaticView(problem=f"module {name} is not found")
    return view_files(file, package if package.is_dir() else package.parent, whole_package=package.is_dir())


def view_files(module: Path, package: Path, *, whole_package: bool = True) -> StaticView:
    """Look at a plugin module and the package directory around it."""
    try:
        tree = ast.parse(module.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        hooks: tuple[str, ...] = ()
        declared, api = None, None
        problem = f"{module} cannot be read: {error}"
    else:
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and _is_hookimpl(n)]
        hooks = tuple(sorted({f.name for f in functions}))
        declared = next((_returned_text(f) for f in functions if f.name == "surogate_config_path"), None)
        api = stated_api(tree)
        problem = ""
    config_dir = search_path_dir(declared) if declared else None
    if config_dir is None and whole_package:
        config_dir = package / "conf"
    files = sorted(package.rglob("*.py")) if whole_package else [module]
    found = [_offered(f) for f in files]
    bundles = sorted({bundle for offered, _ in found for bundle in offered})
    flat_keys = frozenset(key for _, keys in found for key in keys)
    options = config_options(config_dir) if config_dir is not None else {}
    return StaticView(
        hooks=hooks,
        options=options,
        bundles=tuple(bundles),
        flat_keys=flat_keys,
        config_dir=config_dir,
        api=api,
        problem=problem,
    )


def config_options(config_dir: Path) -> dict[tuple[str, str], Path]:
    """(group, option) → file, for every ``<group>/<option>.yaml`` under a config directory."""
    if not config_dir.is_dir():
        return {}
    found = {}
    for file in sorted(config_dir.rglob("*.yaml")):
        group = file.parent.relative_to(config_dir).as_posix()
        if group != ".":
            found[group, file.stem] = file
    return found


def search_path_dir(search_path: str) -> Path | None:
    """The directory of a Hydra search path (``pkg://package.conf``, ``file:///dir`` or a plain path)."""
    scheme, separator, rest = search_path.partition("://")
    if not separator:
        return Path(search_path)
    if scheme == "file":
        return Path(rest)
    if scheme != "pkg":
        return None
    parts = rest.replace("/", ".").split(".")
    root = locate(parts[0])
    return root.joinpath(*parts[1:]) if root is not None else None


def locate(top_level: str) -> Path | None:
    """The directory of a top-level package, or the file of a top-level module; nothing is imported."""
    try:
        spec = _spec(top_level)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def _spec(top_level: str) -> ModuleSpec | None:
    """What an import would take, without setuptools' own finder.

    That one has no module of a distribution, and once it is asked for ``pip`` it lets Python's own distutils through,
    with which setuptools, and so Inductor's compiler for CPUs, cannot be imported any more (before Python 3.12).
    """
    if top_level in sys.modules:
        return find_spec(top_level)
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        if find is not None and type(finder).__module__ != "_distutils_hack":
            spec: ModuleSpec | None = find(top_level, None)
            if spec is not None:
                return spec
    return None


def module_file(name: str) -> Path | None:
    """The source file of a dotted module name."""
    top, *rest = name.split(".")
    root = locate(top)
    if root is None:
        return None
    if not rest:
        file = root / "__init__.py" if root.is_dir() else root
        return file if file.is_file() else None
    stem = root.joinpath(*rest)
    return next((f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()), None)


def module_api(module: str) -> str | None:
    """`SUROGATE_API` of the module that an entry point's value names, read from that one file; None if it has none.

    Raises `OSError`, `SyntaxError` or `ValueError` where the file is not there or not Python.
    """
    name = module.partition(":")[0].strip()
    file = module_file(name)
    if file is None:
        raise FileNotFoundError(f"module {name} is not found")
    return stated_api(ast.parse(file.read_bytes()))


def stated_api(tree: ast.Module) -> str | None:
    """The text that a module assigns to `SUROGATE_API`; ``not a literal`` where it is computed."""
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == "SUROGATE_API" for t in targets):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            literal = value.value if isinstance(value, ast.Constant) else None
            return literal if isinstance(literal, str) else "not a literal"
    return None


def _is_hookimpl(function: ast.FunctionDef) -> bool:
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if last_name(target) == "hookimpl":
            return True
    return False


def _returned_text(function: ast.FunctionDef) -> str | None:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return node.value.value
    return None


@cache
def _kinds_of_classes() -> Mapping[str, str]:
    """Name of a bundle's class → its kind. Commands are found without it, and the import takes its time."""
    from surogate_core.bundles import KINDS

    return {bundle_type.__name__: kind for kind, (_, bundle_type) in KINDS.items()}


def literals(tree: ast.Module) -> dict[str, object]:
    """The values of a module's names that are assigned a literal."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _offered(file: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """(kind, name) of the bundles that a file makes, and the flat keys that it declares."""
    kinds = _kinds_of_classes()
    try:
        text = file.read_text(encoding="utf-8")
        # Parsing is what takes the time, and most files make no bundle.
        if not any(name in text for name in (*kinds, "Flat(")):
            return [], []
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return [], []
    constants = literals(tree)
    bundles, flat_keys = [], []

    def text_of(node: ast.expr) -> str | None:
        value: object = node.value if isinstance(node, ast.Constant) else None
        value = constants.get(node.id) if isinstance(node, ast.Name) else value
        return value if isinstance(value, str) else None

    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = last_name(call.func)
        named = {keyword.arg: text_of(keyword.value) for keyword in call.keywords}
        if called in kinds and (name := named.get("name")) is not None:
            bundles.append((kinds[called], name))
        if called in kinds and (flag := named.get("flag")) is not None:
            flat_keys.append(flag)
        if called == "Flat" and (key := text_of(call.args[0]) if call.args else named.get("key")) is not None:
            flat_keys.append(key)
    return bundles, flat_keys


def last_name(node: ast.expr) -> str:
    """The name that an expression ends with: `b` of `a.b`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
