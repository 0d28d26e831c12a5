"""Keys and options that do not exist: what other trainers call them, and the nearest name here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from surogate_core.bundles.options import field_types
from surogate_core.bundles.tasks import TaskSpec
from surogate_core.config import peers, planned, schema
from surogate_core.config.choices import default_groups
from surogate_core.config.schema import ModelSelection, RunConfig, Selection
from surogate_core.errors import PluginError, Problem
from surogate_core.plugins.flat_keys import FlatKey
from surogate_core.plugins.registry import Registry

KEYS = frozenset(schema.KEYS)
"""The flat keys of the core."""
COMMAND_LINE = "command line"
"""The place of what is set by an override."""
DATA_KEYS = ("datasets", "validation_datasets")
SELECTIONS = ("optimizer", "recipe", "offload", "launcher", "fabric", "rollout", "environment")
"""Keys whose value is a `Selection` of the kind of the same name."""
NAMED = {"objective": "objective", "schedule": "lr_scheduler_type"}
"""Kind → the key whose value is the name of a bundle of that kind; flat keys alone set the bundle's options."""
LIST_GROUPS = frozenset({"monitor"})
"""Groups of which several options are chosen at once."""
OPTIONAL_GROUPS = frozenset({"environment"})
"""Groups of which no option need be chosen, and none is unless the user does."""


def flat_keys(registry: Registry) -> Mapping[str, FlatKey]:
    """The flat keys of the installed plugins; raises `PluginError` for one that is a key of the core."""
    found = registry.flat_keys()
    for key in sorted(found.keys() & (KEYS | default_groups().keys())):
        setting = found[key].settings[0]
        raise PluginError(
            f"flat key {key!r} of {setting.kind} {setting.name} ({setting.plugin.label}) is a key of every run. "
            f"Fix: update {setting.plugin.distribution}, or leave it out with plugins.block=[{setting.plugin.name}]."
        )
    return found


def named_for(task: TaskSpec | None) -> dict[str, str]:
    """`NAMED`, of what is chosen for a task: one with an objective of its own chooses no other."""
    own = task is not None and task.objective is not None
    return {kind: key for kind, key in NAMED.items() if kind != "objective" or not own}


def unknown_key(
    key: str, where: str, registry: Registry, known: Iterable[str] | None = None, value: Any = None
) -> Problem:
    """The problem of a key that does not exist: planned, of a missing plugin, or misspelt."""
    root = key.partition(".")[0]
    if known is None and (peer := peers.of_key(key, value) or peers.of_key(root, None)) is not None:
        # Only the key is known of a swept value, or of a part of a mapping.
        bare = value is None and not peer.reason
        fix = next(iter(peer.settings)) if bare else peer.fix(command_line=where == COMMAND_LINE)
        return Problem(key=key, message="there is no such key.", where=where, fix=fix)
    if known is None and (missing := registry.explain_missing_key(root)) is not None:
        return Problem(key=key, message=missing.message, where=where, fix=missing.fix, needs=missing.needs)
    if known is None and root in planned.ELSEWHERE:
        return Problem(key=key, message="there is no such key.", where=where, fix=planned.ELSEWHERE[root])
    if known is None and root in planned.KEYS:
        return Problem(key=key, message=planned.MESSAGE, where=where, fix=planned.KEYS[root])
    every = KEYS | flat_keys(registry).keys() | default_groups().keys() | registry.options.keys()
    names = sorted(known if known is not None else every)
    last = key.rpartition(".")[2] if known is not None else root
    if known is not None and key.startswith(DATA_KEYS) and (field := peers.of_field(last)):
        fix = field if field.startswith("remove") else f"{key[: len(key) - len(last)]}{field}"
        return Problem(key=key, message="there is no such field.", where=where, fix=fix)
    near = get_close_matches(last, names, n=1, cutoff=0.7)
    message = "there is no such key."
    if not near and known is not None and (others := _with_option(key, registry, where)):
        return Problem(key=key, message=message, where=where, fix=f"remove it, or choose {' or '.join(others)}")
    if not near and known is not None:
        message = f"there is no such key; known here: {', '.join(names) or 'none'}."
    prefix = key[: len(key) - len(last)] if known is not None else ""
    return Problem(key=key, message=message, where=where, fix=f"{prefix}{near[0]}" if near else "")


def _with_option(key: str, registry: Registry, where: str) -> list[str]:
    """The bundles of a group that have the option of ``group.option``, as one writes their choice there."""
    kind, _, option = key.partition(".")
    found, equals = [], "=" if where == COMMAND_LINE else ": "
    for name, bundle in registry.all(kind).items() if kind in SELECTIONS else ():
        try:
            if option in field_types(bundle.options):
                found.append(f"{kind}{equals}{name}")
        except Exception:
            continue  # An unreadable dataclass; whoever chooses the bundle is given the message.
    return found


def unknown_name(group: str, name: str, where: str, registry: Registry, known: Iterable[str], key: str = "") -> Problem:
    """The problem of an option or bundle that does not exist; a broken owner's traceback goes to the log.

    `key` is what the problem is said to be of; without it ``group=name``.
    """
    key = key or f"{group}={name}"
    missing = registry.explain_missing(group, name, known)
    if missing.broken is not None:
        from surogate_core.logs import record_traceback

        path = record_traceback(f"{missing.broken}", missing.broken.error)
        return Problem(
            key=key,
            message=missing.message,
            where=where,
            fix=missing.broken.fix.replace("the traceback is in the log.", f"traceback: {path}"),
        )
    fix = missing.fix
    if not fix.startswith("pip install") and (group, name) not in registry.clashes:
        fix = _peers_fix(group, name, where, key) or fix or _PLACES.get(group, "")
    return Problem(key=key, message=missing.message, where=where, fix=fix, needs=missing.needs)


_PLACES = {
    "dataset": "datasets=FILE_OR_HUB_ID",
    "model": "name a model's directory, or OWNER/NAME on the hub",
}
"""What to name instead of a name that is like no known one, for groups that take places too."""


def _peers_fix(group: str, name: str, where: str, key: str) -> str:
    """What to write instead of a name that other trainers have for an option or a type; empty where none has it."""
    command_line = where == COMMAND_LINE
    if key.startswith(DATA_KEYS):
        found = peers.of_type(name)
        return ", ".join(f"{k}: {v}" for k, v in found.items()) if found else ""
    if group == "dataset" and (Path(name.partition(",")[0]).suffix or "/" in name or "," in name):
        return peers.Peer(settings={"datasets": name}).fix(command_line=command_line)
    peer = peers.of_value(key.partition("=")[0], name)
    return peer.fix(command_line=command_line) if peer is not None else ""


def schema_defaults() -> dict[str, Any]:
    """Every flat key of the core with its default; the nodes of groups come from their options."""
    values: dict[str, Any] = {}
    for field in (f for f in fields(RunConfig) if f.name in KEYS):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name in LIST_GROUPS or isinstance(default, Selection | ModelSelection):
            continue
        values[field.name] = asdict(default) if is_dataclass(default) and not isinstance(default, type) else default
    return values
