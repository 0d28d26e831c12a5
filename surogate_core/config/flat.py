"""The flat keys of plugins in a configuration: which are set, and which option of a chosen bundle each one sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import flat_marks
from surogate_core.config.composing.overrides import COMMAND_LINE
from surogate_core.config.names import LIST_GROUPS, flat_keys
from surogate_core.config.schema import RunConfig
from surogate_core.errors import Problem

if TYPE_CHECKING:
    from surogate_core.config.typed import Builder
    from surogate_core.plugins.registry import Registry


class FlatValues:
    """The flat keys that a composed configuration sets, with values of the declared types."""

    def __init__(
        self, values: Mapping[str, Any], registry: Registry, builder: Builder, is_set: Callable[[str], bool]
    ) -> None:
        self.is_set = is_set
        self.keys = flat_keys(registry)
        self.where = builder.where
        self.values: dict[str, Any] = {}
        """Flat key → value, of those that are set and sound."""
        self.taken: set[str] = set()
        """Flat keys that set an option of a chosen bundle."""
        for key in (key for key in values if key in self.keys):
            before = len(builder.problems)
            value = builder.value(self.keys[key].hint, values[key], key)
            if len(builder.problems) == before:
                self.values[key] = value

    def merged(self, cls: type, node: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[Problem]]:
        """The options that a chosen bundle's node sets (its dotted key is `prefix`), with those of flat keys.

        An option file gives way to a flat key, and so does the YAML file to the command line, whichever form each
        uses. Elsewhere an option and its flat key with different values are a mistake.
        """
        options, problems = dict(node), []
        for option, mark in flat_marks(cls).items():
            if mark.key not in self.values:
                continue
            self.taken.add(mark.key)
            value, key = self.values[mark.key], f"{prefix}.{option}"
            flat_rank, node_rank = self._rank(mark.key), self._rank(key)
            if option not in node or node[option] == value or flat_rank > node_rank or not node_rank:
                options[option] = value
            elif flat_rank == node_rank:
                message = f"is {_shown(value)}, and {key}, which is the same option, is {_shown(node[option])}."
                problems.append(Problem(key=mark.key, message=message, where=self.where(mark.key), fix="keep one"))
        return options, problems

    def _rank(self, key: str) -> int:
        """How strong the place is where a key is set: option files, the YAML file, the command line."""
        if not self.is_set(key):
            return 0
        return 2 if self.where(key) == COMMAND_LINE else 1

    def without_use(self, chosen: Mapping[str, Sequence[str]]) -> list[Problem]:
        """A mistake for each key that is set although no chosen bundle declares it, where that is a mistake.

        `chosen`: kind → names of the bundles that the configuration chooses.
        """
        problems = []
        for key, value in self.values.items():
            flat = self.keys[key]
            if not flat.needed or all(value == setting.default for setting in flat.settings):
                continue
            if not any(s.kind not in chosen or s.name in chosen[s.kind] for s in flat.settings):
                first = flat.settings[0]
                message = f"is set, but {first.group} {first.name}, which does it, is not chosen."
                is_list = first.kind in LIST_GROUPS
                fix = f"add {first.name} to `{first.kind}`" if is_list else f"{first.group}: {first.name}"
                problems.append(Problem(key=key, message=message, where=self.where(key), fix=fix))
        return problems

    def chosen(self, kind: str) -> dict[str, str]:
        """Key → the bundle of a kind that it chooses, of the keys that are true."""
        found = {key: self.keys[key].chooses for key, value in self.values.items() if value is True}
        return {key: bundle[1] for key, bundle in found.items() if bundle is not None and bundle[0] == kind}

    def left(self) -> dict[str, Any]:
        """The keys that no chosen bundle took, and whose value is not the default."""
        free = {key: value for key, value in self.values.items() if key not in self.taken}
        return {k: v for k, v in sorted(free.items()) if any(v != s.default for s in self.keys[k].settings)}


def flat_defaults(registry: Registry) -> dict[str, Any]:
    """Flat key of the installed plugins → its default."""
    return {key: flat.settings[0].default for key, flat in flat_keys(registry).items()}


def no_effect_notes(config: RunConfig, registry: Registry, used: Callable[[str], bool]) -> list[str]:
    """What a run says of flat keys that are set while no chosen bundle has the option, and of an environment that no
    task asks.

    `used`: whether something else than an option of a node reads the key.
    """
    notes = []
    tasks = registry.all("task")
    if config.environment is not None and tasks[config.task].online is None:
        able = " or ".join(name for name, spec in tasks.items() if spec.online is not None)
        fix = f", or choose task {able}" if able else ""
        notes.append(f"environment={config.environment.name} has no effect in task {config.task}. Leave it out{fix}.")
    for key, value in config.flat.items():
        flat = flat_keys(registry).get(key)
        if flat is None or flat.chooses is not None or used(key):
            continue
        owners = [f"{s.group}={s.name}" for s in flat.settings]
        notes.append(f"{key}={_shown(value)} has no effect: it is an option of {' and '.join(owners)}. Leave it out.")
    return notes


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else f"{value}"
