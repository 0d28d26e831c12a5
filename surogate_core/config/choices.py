"""The choices of the primary config: what is chosen in each group where the user chooses nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from surogate_core.conf_paths import CONFIG_NAME, conf_dir


@cache
def default_groups() -> Mapping[str, Any]:
    """Group → option(s) of the defaults list in the primary config."""
    text = (conf_dir() / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


@cache
def offloader_of_keys() -> str:
    """The offloader that the `offload_*` keys use if `offload` is none; the file `offload/auto.yaml` names it."""
    text = (conf_dir() / "offload" / "auto.yaml").read_text(encoding="utf-8")
    return str(yaml.safe_load(text)["name"])
