"""Options dataclasses of plugins: their annotations, and the flat keys that set them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Flat:
    """Mark in the annotation of an option: a flat key of the configuration sets it.

    ``momentum: Annotated[float, Flat("normuon_momentum")] = 0.95`` may be set as ``normuon_momentum=0.9`` and as
    ``optimizer.momentum=0.9``. Several bundles may declare a key with the same type; it sets the option of the chosen
    one.
    """

    key: str
    """Name of the flat key, unlike every key of the core; by custom it begins with the plugin's name."""
    needed: bool = False
    """Whether setting the key is an error if no bundle that declares it is chosen; otherwise the run reports that the
    key has no effect.
    """
    essential: bool = False
    """Whether a checkpoint can be resumed only with an equal value: saved state depends on it."""


@dataclass(frozen=True, slots=True)
class Code:
    """Mark in the annotation of an option: its text, or each text of a list, names a function as ``module:function``.

    The policy for plugins applies to it when the configuration is checked. `surogate_core.plugins.functions` loads it.
    """

    function: bool = True
    """Whether a function is named; otherwise the text names a module, and empty text none."""


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a bundle that has none."""


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field of a dataclass → its annotation, `Annotated` kept."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


@cache
def flat_marks(cls: type) -> Mapping[str, Flat]:
    """Field of an options dataclass → its flat key, for the fields that have one."""
    marks = {name: [m for m in marks_of(hint) if isinstance(m, Flat)] for name, hint in field_types(cls).items()}
    return {name: found[0] for name, found in marks.items() if found}


def without_flat(hint: Any) -> Any:
    """An annotation without its `Flat` mark."""
    kept = tuple(mark for mark in marks_of(hint) if not isinstance(mark, Flat))
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return Annotated[(base, *kept)] if kept else base


def option_defaults(cls: type) -> dict[str, Any]:
    """Option → its default, for those that have one."""
    found = {}
    for field in fields(cls):
        if field.default is not MISSING:
            found[field.name] = field.default
        elif field.default_factory is not MISSING:
            found[field.name] = field.default_factory()
    return found


def flat_values(options: Any) -> dict[str, Any]:
    """Flat key → value, of the options that have a flat key; empty for None."""
    return {mark.key: getattr(options, name) for name, mark in _marks_of(options).items()}


def essential_values(options: Any) -> dict[str, Any]:
    """The same, only of those that must be equal to resume a checkpoint."""
    return {mark.key: getattr(options, name) for name, mark in _marks_of(options).items() if mark.essential}


def options_from_flat(cls: type, values: Mapping[str, Any]) -> Any:
    """An instance of an options dataclass from flat keys and their values; other keys are ignored."""
    return cls(**{name: values[mark.key] for name, mark in flat_marks(cls).items() if mark.key in values})


def _marks_of(options: Any) -> Mapping[str, Flat]:
    cls: type = type(options)
    return flat_marks(cls) if options is not None else {}


def marks_of(hint: Any) -> tuple[Any, ...]:
    """The marks in an annotation."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()
