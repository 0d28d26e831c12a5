"""The `defaults` list of a config file: choices of options, in the form that Hydra's configs have."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from surogate_core.conf_paths import CONFIG_NAME
from surogate_core.config.yamlfile import YamlFile
from surogate_core.errors import Problem

if TYPE_CHECKING:
    from surogate_core.config.composing.overrides import UserSettings


def choose_defaults(settings: UserSettings, entries: Any, file: YamlFile) -> None:
    """Choose by a `defaults` list, as a config of Hydra has it: ``- recipe: bf16``, ``- override /recipe: bf16``."""

    def problem(index: int | None, message: str, fix: str = "") -> None:
        key = "defaults" if index is None else f"defaults.{index}"
        settings.problems.append(Problem(key=key, message=message, where=file.where(key), fix=fix))

    if not isinstance(entries, list):
        problem(None, f"must be a list; got {entries!r}.", "defaults: [{GROUP: OPTION}]")
        return
    for index, entry in enumerate(entries):
        if entry == CONFIG_NAME:
            continue
        if entry == "_self_":
            if index + 1 < len(entries):
                problem(index, "the keys of the file override what `defaults` chooses.", "put _self_ last")
            continue
        if not isinstance(entry, Mapping) or len(entry) != 1:
            problem(index, f"must be one choice; got {entry!r}.", "- GROUP: OPTION")
            continue
        ((name, option),) = entry.items()
        words = str(name).split()
        group = words[-1].lstrip("/") if words else ""
        if set(words[:-1]) - {"override", "optional"} or "@" in group:
            problem(index, f"{name}: only `GROUP` and `override /GROUP` are supported.", "- GROUP: OPTION")
        elif group not in settings.groups:
            near = get_close_matches(group, sorted(settings.groups), n=1, cutoff=0.6)
            problem(index, f"there is no group {group!r}.", f"- {near[0]}: OPTION" if near else "")
        elif isinstance(option, str | list) or (option is None and group in ("monitor", "dataset")):
            settings.choose_value(group, option, file.where(f"defaults.{index}"))
        else:
            problem(index, f"must name an option of {group}; got {option!r}.", f"- {group}: OPTION")
