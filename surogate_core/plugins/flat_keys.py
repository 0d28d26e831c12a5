"""The flat keys that plugins declare, collected from the options of what they offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import field_types, flat_marks, option_defaults, without_flat
from surogate_core.errors import PluginError

if TYPE_CHECKING:
    from surogate_core.plugins.discovery import InstalledPlugin
    from surogate_core.plugins.registry import Registry

PART_KINDS = ("policy_loss", "advantage")
"""Kinds whose bundle the options of a task choose."""
KINDS_WITH_FLAT_KEYS = (
    "objective",
    "optimizer",
    "schedule",
    "recipe",
    "quant",
    "offload",
    "launcher",
    "fabric",
    "rollout",
    "monitor",
    "task",
    *PART_KINDS,
)
"""Kinds whose bundle is chosen for the run as a whole; entries of `datasets` have fields instead."""


CHOSEN_BY = {"quant": "qlora_format", "schedule": "lr_scheduler_type", "policy_loss": "loss_type"}
"""Kind → the key that chooses a bundle of it, where that is not the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatKeySetting:
    """What a flat key sets: an option of one bundle, or the choice of that bundle."""

    kind: str
    name: str
    """Name of the bundle."""
    option: str | None
    """None: the key is a switch that chooses the bundle."""
    default: Any
    needed: bool
    plugin: InstalledPlugin
    options: type | None
    """Dataclass that has the option."""

    @property
    def group(self) -> str:
        """The key that chooses the bundle."""
        return CHOSEN_BY.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatKey:
    """A flat key of plugins."""

    key: str
    hint: Any
    """Annotation of its value."""
    settings: tuple[FlatKeySetting, ...]
    """In the order of kinds and names."""

    @property
    def chooses(self) -> tuple[str, str] | None:
        """(kind, name) of the bundle that the key chooses where it is true; None for the key of an option."""
        first = self.settings[0]
        return (first.kind, first.name) if first.option is None else None

    @property
    def needed(self) -> bool:
        """Whether it is a mistake to set the key where no bundle that declares it is chosen."""
        return any(setting.needed for setting in self.settings)


def collect(registry: Registry) -> dict[str, FlatKey]:
    """Flat key → what it sets.

    Raises `PluginError` when two bundles declare one key with different types, or a key chooses a bundle and is also
    declared elsewhere.
    """
    found: dict[str, FlatKey] = {}
    for kind in KINDS_WITH_FLAT_KEYS:
        try:
            offers = registry.bundles(kind)
        except PluginError:
            continue  # Two plugins offer one name; whoever chooses in this kind is given the message.
        for name, offered in offers.items():
            for key, hint, setting in _declared(kind, name, offered.bundle, offered.plugin):
                other = found.get(key)
                if other is not None and (setting.option is None or repr(other.hint) != repr(hint) or other.chooses):
                    raise PluginError(_clash(key, other.settings[0], setting))
                before = other.settings if other is not None else ()
                found[key] = FlatKey(key=key, hint=hint, settings=(*before, setting))
    return found


def _declared(kind: str, name: str, bundle: Any, plugin: InstalledPlugin) -> list[tuple[str, Any, FlatKeySetting]]:
    """(flat key, annotation, what it sets) of one bundle."""
    found = []
    flag = getattr(bundle, "flag", None)
    if flag is not None:
        setting = FlatKeySetting(
            kind=kind, name=name, option=None, default=False, needed=False, plugin=plugin, options=None
        )
        found.append((flag, bool, setting))
    cls = getattr(bundle, "options", None)
    try:
        marks = flat_marks(cls) if isinstance(cls, type) else {}
    except Exception:
        return found  # An unreadable dataclass; whoever chooses the bundle is given the message.
    for option, mark in marks.items():
        assert cls is not None
        setting = FlatKeySetting(
            kind=kind,
            name=name,
            option=option,
            default=option_defaults(cls).get(option),
            needed=mark.needed,
            plugin=plugin,
            options=cls,
        )
        found.append((mark.key, without_flat(field_types(cls)[option]), setting))
    return found


def _clash(key: str, first: FlatKeySetting, second: FlatKeySetting) -> str:
    return (
        f"flat key {key!r} of {second.kind} {second.name} ({second.plugin.label}) has another type than that of "
        f"{first.kind} {first.name} ({first.plugin.label}). Fix: uninstall one of them, or leave one out with "
        f"plugins.block=[{second.plugin.name}]."
    )
