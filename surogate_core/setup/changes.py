"""The changes of a run's configuration since its checkpoint was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surogate_core.config.resolve import to_dict
from surogate_core.config.schema import RunConfig
from surogate_core.hf.card import OF_THE_PLACE
from surogate_core.masking import masked_values
from surogate_core.train.checkpoint import shown


def recorded(config: RunConfig) -> dict[str, Any]:
    """The part of the configuration that a checkpoint records: all keys except places of the run, secrets masked."""
    values = {key: value for key, value in to_dict(config).items() if key not in OF_THE_PLACE}
    restored: dict[str, Any] = json.loads(json.dumps(masked_values(values)))
    return restored


def changes_note(
    saved: Mapping[str, Any], config: RunConfig, *, path: Path, flat: Mapping[str, Any] | None = None
) -> str | None:
    """One sentence with every key that differs from the checkpoint (its state, its `path`), old value → new value.

    `flat`: the plugins' flat keys with their defaults, which a configuration need not have.
    """
    if "config" not in saved:
        return None
    before, now = dict(flat_values(saved["config"])), dict(flat_values(recorded(config)))
    defaults = dict(flat_values(recorded(RunConfig()) | dict(flat or {})))
    changed = []
    for key in sorted(before.keys() | now.keys()):
        if key in before and key in now and before[key] == now[key]:
            continue
        if key not in before and key in defaults and defaults[key] == now[key]:
            continue  # A key of a later version or another plugin, at its default.
        if key not in now and flat is not None and key in flat and before[key] == flat[key]:
            continue  # A key of a plugin whose bundle is not chosen.
        old, new = shown(before, key), shown(now, key)
        changed.append(f"{key}: {old} → {new}" if old != new else f"{key}: changed")
    return f"Changed since {path} was saved: {'; '.join(changed)}." if changed else None


def flat_values(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key → value that is neither a mapping nor a list."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from flat_values(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from flat_values(inner, f"{key}[{number}]")
    else:
        yield key, value
