"""Functions of a user that an option names, as ``module:function`` or ``file.py:function``.

They are code, so the policy for plugins applies to them: under `allowlist` and `locked` a function must be in the
package of a plugin that may be imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import Code, field_types, marks_of
from surogate_core.errors import UserError
from surogate_core.plugins.discovery import ImportPolicy, InstalledPlugin, installed_plugins

if TYPE_CHECKING:
    from collections.abc import Iterable


def code_of(options: Any) -> Iterator[tuple[str, str, Code]]:
    """(field, text, its mark) of all code that an options dataclass names."""
    cls: type = type(options)
    for name, hint in field_types(cls).items():
        for mark in (mark for mark in marks_of(hint) if isinstance(mark, Code)):
            value = getattr(options, name)
            for text in value if isinstance(value, list | tuple) else [value]:
                if text is not None and (text or mark.function):
                    yield name, text, mark


def mistake(
    text: str, policy: ImportPolicy, plugins: Iterable[InstalledPlugin] | None = None, mark: Code | None = None
) -> str | None:
    """Why a function may not be loaded, as a sentence, or None. Nothing is imported.

    `plugins`: the installed ones, by default found in this environment. `mark`: that of the option.
    """
    module, separator, function = text.rpartition(":")
    if mark is not None and not mark.function:
        module, separator, function = text, ":", "module"
    is_file = module.endswith(".py") and (mark is None or mark.function)
    named = is_file or all(part.isidentifier() for part in module.split("."))
    if not separator or not module or not function.isidentifier() or not named:
        if mark is not None and not mark.function:
            return f"{text!r} names no module."
        return f"{text!r} names no function; it is written module:function or file.py:function."
    owners = {_package(p): p for p in (installed_plugins() if plugins is None else plugins)}
    owner = None if is_file else owners.get(module.partition(".")[0])
    if owner is not None:
        refusal = policy.refusal(owner.name)
        return f"{text} is code of {owner.label}, which is {refusal}." if refusal else None
    if policy.allow or policy.locks:
        where = policy.allow[0][0] if policy.allow else policy.locks[0].where
        return f"{text} is not in the package of a plugin, and {where} allows only the code of plugins."
    return None


def load_function(text: str, *, key: str, policy: ImportPolicy) -> Callable[..., Any]:
    """The function that a text names. Raises `UserError` if it may not be loaded, or cannot be.

    `key`: what names it in the configuration. The working directory is searched last.
    """
    wrong = mistake(text, policy)
    if wrong is not None:
        raise UserError(f"{key}: {wrong}")
    module, _, name = text.rpartition(":")
    try:
        found = getattr(_file(module) if module.endswith(".py") else _module(module), name, None)
    except Exception as error:
        said = " ".join(str(error).split())
        raise UserError(f"{key}: {module} cannot be imported: {type(error).__name__}: {said}") from error
    if not callable(found):
        raise UserError(f"{key}: {module} has no function {name!r}.")
    return found


def _module(name: str) -> Any:
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        return import_module(name)
    finally:
        if added:
            sys.path.remove(here)


def _file(path: str) -> Any:
    file = Path(path).expanduser().absolute()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    name = f"surogate_function_{file.stem}"
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules[name] = made
    try:
        spec.loader.exec_module(made)
    except BaseException:
        del sys.modules[name]
        raise
    return made


def _package(plugin: InstalledPlugin) -> str:
    return plugin.module.partition(":")[0].partition(".")[0]
