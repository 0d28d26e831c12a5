"""The keys' documentation, read from the docstrings under the fields of the schema."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from surogate_core.config.schema import KEYS, ModelSelection, PluginPolicy, RunConfig, Selection

if TYPE_CHECKING:
    from surogate_core.plugins.flat_keys import FlatKey

_NODES: dict[str, type] = {"model": ModelSelection, "plugins": PluginPolicy}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDoc:
    """One key."""

    key: str
    """Dotted."""
    section: str
    """Heading of the schema that it is under."""
    type: str
    default: str
    """As YAML."""
    text: str


def key_docs(flat: Mapping[str, FlatKey] | None = None) -> Iterator[KeyDoc]:
    """Every key of a run, in the schema's order; the fields of `model` and `plugins` follow them.

    `flat`: the plugins' flat keys; each is in the section of the key that chooses its bundle, after the core's.
    """
    hints = _types(RunConfig)
    sections = {name: section for name, section in _sections().items() if name in KEYS}
    for section, names in groupby(sections, key=lambda name: sections[name]):
        listed = list(names)
        for name in listed:
            yield _doc(RunConfig, name, name, section, hints[name])
            if name in _NODES:
                for sub, hint in _types(_NODES[name]).items():
                    yield _doc(_NODES[name], sub, f"{name}.{sub}", section, hint)
        for found in (flat or {}).values():
            if _section_key(found, flat or {}) in listed:
                yield _flat_doc(found, section)


def _section_key(found: FlatKey, flat: Mapping[str, FlatKey]) -> str:
    """The key of the core that chooses the bundle, or the task whose option chooses it."""
    group = found.settings[0].group
    return flat[group].settings[0].group if group in flat else group


def _flat_doc(flat: FlatKey, section: str) -> KeyDoc:
    """A plugins' key: the text of the first bundle's option, with the names of the bundles that have it."""
    from surogate_core.config.typed import type_text

    first = flat.settings[0]
    *names, last = [s.name for s in flat.settings]
    named = f"{', '.join(names)} or {last}" if names else last
    of = f"{first.group}={named}"
    if first.option is None:
        text = f"Short for {of}."
    else:
        assert first.options is not None
        text = f"{field_docs(first.options).get(first.option, '')} An option of {of}.".lstrip()
    default = first.default if isinstance(first.default, str) else json.dumps(first.default)
    return KeyDoc(key=flat.key, section=section, type=type_text(flat.hint), default=default, text=text)


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Field name → the docstring below it, on one line; fields without a docstring are omitted."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            docs[field.target.id] = " ".join(str(after.value.value).split())  # type: ignore[attr-defined]
    return docs


def _doc(cls: type, name: str, key: str, section: str, type_text: str) -> KeyDoc:
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    return KeyDoc(key=key, section=section, type=type_text, default=_default(field), text=field_docs(cls).get(name, ""))


def _types(cls: type) -> dict[str, str]:
    from surogate_core.bundles.options import field_types
    from surogate_core.config.typed import type_text

    hints = field_types(cls)
    words = {name: "an option" for name, hint in hints.items() if hint in (Selection, Selection | None)}
    words |= {"monitor": "a list of options", "model": "an option, a directory or a hub id"}
    return {n: words[n] if cls is RunConfig and n in words else type_text(h) for n, h in hints.items()}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.name in ("model", "monitor") or field.type == "PluginPolicy":
        return ""
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if isinstance(value, Selection):
        return value.name
    return value if isinstance(value, str) else json.dumps(value)


def _sections() -> dict[str, str]:
    """Field → the heading comment above it (``# ---- the run``)."""
    sections, heading = {}, ""
    for line in inspect.getsource(RunConfig).splitlines():
        text = line.strip()
        if text.startswith("# --"):
            heading = text.lstrip("#- ").strip()
        elif line.startswith("    ") and not line.startswith("     ") and ":" in text:
            name = text.partition(":")[0]
            if name.isidentifier():
                sections[name] = heading
    return sections
