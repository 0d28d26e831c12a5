"""What other trainers call the keys, values and types of data sets, from ``peers.yaml``.

Their names are not accepted: an error says what to write here, in a form to paste.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("peers.yaml")
PEERS = {"ax": "Axolotl", "lf": "LLaMA-Factory", "hf": "transformers and TRL", "un": "Unsloth", "tt": "torchtune"}
"""Short name in the table → name."""

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What to write here instead of a key, or of a value, of another trainer."""

    settings: Settings
    """Keys and values; empty if the fix is to remove the key."""
    reason: str = ""
    """Why the key must go."""

    def fix(self, *, command_line: bool) -> str:
        """As a user pastes it: overrides, or lines of YAML."""
        if self.reason:
            return f"remove it: {self.reason}"
        if command_line:
            return " ".join(shlex.quote(f"{key}={shown(value, ',')}") for key, value in self.settings.items())
        return " and ".join(f"{key}: {shown(value)}" for key, value in self.settings.items())


def shown(value: Any, comma: str = ", ") -> str:
    """A value as YAML in one line, which an override takes too if `comma` has no space."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + comma.join(f"{k}: {shown(v, comma)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + comma.join(shown(v, comma) for v in value) + "]"
    text = str(value)
    if isinstance(value, str) and not _is_plain(text):
        return json.dumps(text, ensure_ascii=False)
    # YAML reads 1e-08 as text.
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


@cache
def table() -> Mapping[str, Any]:
    """The file."""
    # libyaml reads it in a tenth of the time.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: Mapping[str, Any] = yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader)
    return found


def _is_plain(text: str) -> bool:
    """Whether YAML reads a text without quotes as a scalar of the same characters."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    return found == text or not isinstance(found, str | list | dict)


def of_key(key: str, value: Any) -> Peer | None:
    """What replaces a key that does not exist here; None where no other trainer has it."""
    row = table()["keys"].get(key)
    if row is None:
        return None
    if "drop" in row:
        return Peer(settings={}, reason=row["drop"])
    if "to" in row:
        names = row.get("values", {})
        return Peer(settings={row["to"]: _typed(names[str(value)]) if str(value) in names else value})
    chosen = row["set"]
    return _peer(chosen.get(_word(value), chosen.get("", next(iter(chosen.values())))), value)


def of_value(key: str, value: Any) -> Peer | None:
    """What replaces a value of a key that exists here."""
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    words = table()["values"].get(key, {})
    if not isinstance(only, str) or only not in words:
        return None
    found = words[only]
    if key == "optimizer" or (key == "lr_scheduler_type" and isinstance(found, str)):
        return Peer(settings={key: found})
    return _peer(found, value)


def of_type(name: str) -> Settings | None:
    """The fields of an entry of `datasets` for a type of another trainer."""
    found: Settings | None = table()["types"].get(name)
    return found


def of_field(name: str) -> str:
    """The field of an entry of `datasets`, or why to remove it; empty where no other trainer has it."""
    row = table()["fields"].get(name, {})
    return row.get("to", "") or (f"remove it: {row['drop']}" if row else "")


def _peer(found: Any, value: Any) -> Peer:
    if isinstance(found, str):
        return Peer(settings={}, reason=found)
    return Peer(settings={key: value if item == "$" else item for key, item in found.items()})


def _word(value: Any) -> str:
    """The value as the table has it."""
    return "no" if value is None else shown(value).lower()


def _typed(text: Any) -> Any:
    return yaml.safe_load(text) if isinstance(text, str) else text
