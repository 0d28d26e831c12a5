"""Modules that offer names of other modules and import those on first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def lazily(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a module that offers what it imports under `if TYPE_CHECKING`.

    So one list serves type checkers, readers and the running program, which imports each name when it is first used.
    """
    names = offered_names(Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8"))

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        source, original = names[name]
        if source == module:
            return importlib.import_module(f"{source}.{original}")
        home = sys.modules.get(source) or importlib.import_module(source)
        # A name may be a module that nobody has imported yet.
        return getattr(home, original) if hasattr(home, original) else importlib.import_module(f"{source}.{original}")

    return get, lambda: sorted({*vars(sys.modules[module]), *names}), sorted(names)


def offered_names(source: str) -> Mapping[str, tuple[str, str]]:
    """Name → (module, name there), from the imports under `if TYPE_CHECKING` of a module's source."""
    blocks = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    guarded = (block for block in blocks if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING")
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for block in guarded
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
