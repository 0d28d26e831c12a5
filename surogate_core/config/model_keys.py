"""Checks the keys that `model.config` may set: the keys of the model's `config.json` or of its transformers class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from surogate_core.errors import Problem

_ANYWHERE = frozenset({"architectures", "dtype", "model_type", "rope_parameters", "rope_scaling", "rope_theta"})
"""Keys of every decoder, some of them under the names of other versions of transformers."""


def unknown_model_keys(given: Iterable[str], base: Mapping[str, Any], model_types: Iterable[str]) -> list[Problem]:
    """A problem for each key that the model cannot have; `base` is its `config.json` before the keys are set.

    transformers is imported for keys alone that `base` does not have. A family that transformers does not know may
    have any key but one that is nearly a key of `base`.
    """
    strange = [key for key in given if key not in base and key not in _ANYWHERE]
    if not strange:
        return []
    legal, known_class = _class_keys(model_types)
    known = sorted({*base, *legal, *_ANYWHERE})
    problems = []
    for key in strange:
        near = get_close_matches(key, known, n=1, cutoff=0.6 if known_class else 0.85)
        if key not in legal and (known_class or near):
            message = f"the model's config.json has no key {key}."
            fix = f"model.config.{near[0]}" if near else ""
            problems.append(Problem(key=f"model.config.{key}", message=message, fix=fix))
    return problems


def _class_keys(model_types: Iterable[str]) -> tuple[set[str], bool]:
    """The keys of the transformers classes of these types, and whether there is any such class."""
    from transformers import CONFIG_MAPPING

    classes = [CONFIG_MAPPING[kind] for kind in model_types if kind in CONFIG_MAPPING]
    return {key for cls in classes for key in cls().to_dict()}, bool(classes)
