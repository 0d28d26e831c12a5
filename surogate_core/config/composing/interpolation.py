"""How much text the interpolations of a configuration expand to, computed before they are resolved.

OmegaConf resolves a reference anew wherever it is used: eight keys that each name the next ten times are 10^8 look-ups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_SIZE = 1_000_000
"""Characters that a key may expand to; each use of a reference counts."""
_REFERENCE = re.compile(r"\$\{(?:oc\.(?:select|dict\.keys|dict\.values|deprecated):)?\s*([\w.\[\]-]+)")


def too_large(values: Mapping[str, Any]) -> list[str]:
    """The top-level keys whose interpolations become too large; `values` are unresolved."""
    texts = dict(_texts(values, ""))
    sizes: dict[str, int] = {}

    def size(key: str) -> int:
        if key in sizes:
            return sizes[key]
        sizes[key] = 0  # a cycle is OmegaConf's to report
        total = len(texts[key])
        for match in _REFERENCE.finditer(texts[key]) if "${" in texts[key] else ():
            total += sum(size(other) for other in _below(_absolute(match[1], key), texts))
        sizes[key] = total
        return total

    return sorted({key.partition(".")[0] for key in texts if size(key) > MAX_SIZE})


def _absolute(reference: str, key: str) -> str:
    """The dotted key that a reference in the value of `key` names; each dot before it is a level up."""
    name = reference.lstrip(".")
    ups = len(reference) - len(name)
    name = name.replace("[", ".").replace("]", "")
    return ".".join([*key.split(".")[:-ups], name]) if ups else name


def _below(key: str, texts: Mapping[str, str]) -> list[str]:
    if key in texts:
        return [key]
    return [other for other in texts if other.startswith(f"{key}.")]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield key, str(value)
        return
    for name, item in items:
        yield from _texts(item, f"{key}.{name}" if key else str(name))
