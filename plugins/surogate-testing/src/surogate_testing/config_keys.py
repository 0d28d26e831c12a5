"""The check of what a model family makes of a ``config.json`` that leaves keys out, or has them null.

transformers' class reads the same file, and both have the same random weights. Blocks run without an engine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch

from surogate_core.plugin import UserError, bundles, dsl
from surogate_core.service.engine import distinct, pieces
from surogate_core.service.model import EXPERT, KeyValues, expanded
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.model_blocks import logits_of
from surogate_testing.models import (
    MOST_PARAMETERS,
    TOLERANCE,
    document_length,
    reference,
    state_for,
    their_config,
    tiny_presets,
)

LENGTH = 24
"""Tokens of the document where no window needs more."""
SPARED = frozenset({"model_type", "architectures"})


def reads_absent_and_null_keys_as_transformers(family: bundles.ModelFamily) -> None:
    """A `config.json` without a key, or with null, is the model that transformers' class makes of it, or is refused."""
    problems = [
        f"preset `{name}` {problem}"
        for name, preset in tiny_presets(family).items()
        for problem in problems_of(family, preset)
    ]
    ensure(not problems, "; ".join(problems))


def problems_of(family: bundles.ModelFamily, preset: Mapping[str, Any]) -> list[str]:
    """What is wrong with a preset, with it without one of its keys, without all that are no sizes, or with one null."""
    if problem := _difference(family, preset):
        return [f"as it is: {problem}. {_left_out(preset)}"]
    problems, spared = [], dict(preset)
    kept = SPARED | frozenset(family.build(dict(preset)).unlike_transformers)
    for key in sorted(preset.keys() - kept):
        problem = _difference(family, {name: value for name, value in preset.items() if name != key})
        if problem:
            value = getattr(their_config({k: v for k, v in preset.items() if k != key}), key, None)
            problems.append(f"without `{key}`: {problem}. transformers takes {value!r}. Fix: {_FIX}")
        if problem == "":
            del spared[key]
    if not problems and (problem := _difference(family, spared)):
        problems.append(f"without {', '.join(sorted(preset.keys() - spared.keys()))}: {problem}. Fix: {_FIX}")
    for key in sorted((preset.keys() | _own_keys(preset)) - kept):
        if problem := _difference(family, {**preset, key: None}):
            problems.append(f"with `{key}` null: {problem}. Fix: `null=` of the `Setting`, or refuse it")
    return problems


_FIX = "give the family's default, in `defaults` of a `Decoder` or as `default=` of the `Dim` or `Setting`"


def _left_out(preset: Mapping[str, Any]) -> str:
    defaults = {key: getattr(their_config(preset), key, None) for key in _own_keys(preset) - preset.keys()}
    listed = ", ".join(f"{key} {value!r}" for key, value in sorted(defaults.items()) if value is not None)
    return f"transformers' values of the keys that it leaves out: {listed}. Fix: {_FIX}"


def _own_keys(preset: Mapping[str, Any]) -> set[str]:
    """The keys that a configuration of transformers has beside those of every configuration."""
    from transformers import PreTrainedConfig

    return set(type(their_config(preset))().to_dict()) - set(PreTrainedConfig().to_dict()) - {"use_cache"}


def _difference(family: bundles.ModelFamily, config: Mapping[str, Any]) -> str | None:
    """How the family's model of a file differs from transformers'; empty: in nothing. None if one of them refuses the
    file, or the model is too large to compute with.
    """
    try:
        model = family.build(dict(config))
    except UserError:
        return None
    try:
        theirs = their_config(config)
        with torch.device("meta"):
            empty = _class_of(theirs)
    except NotApplicable:
        raise
    except Exception:  # whatever transformers raises for a file that it cannot read
        return None
    try:
        expected = {name: tuple(tensor.shape) for name, tensor in state_for(model, empty).items()}
    except AssertionError as error:
        return str(error)
    own = _shapes(model)
    for name in sorted(own.keys() | expected.keys()):
        if own.get(name) != expected.get(name):
            return f"{name} has the shape {own.get(name)}, and in transformers' class {expected.get(name)}"
    if sum(map(math.prod, own.values())) > MOST_PARAMETERS:
        return None
    return _results_differ(family, model, config)


def _class_of(theirs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(theirs)


def _shapes(model: dsl.Model) -> dict[str, tuple[int, ...]]:
    """Name in files → shape, of each expert by itself."""
    found: dict[str, tuple[int, ...]] = {}
    for spec in distinct(pieces(model, lora=None, max_seqlen=8)):
        if EXPERT in spec.hf_name:
            found |= dict.fromkeys(expanded(spec.hf_name, spec.shape), spec.shape[1:])
        else:
            found[spec.hf_name] = spec.shape
    return found


def _results_differ(family: bundles.ModelFamily, model: dsl.Model, config: Mapping[str, Any]) -> str | None:
    length = LENGTH
    try:
        theirs = reference(family, config)
        with contextlib.suppress(AssertionError):  # a default that no document exceeds
            length = document_length(model, theirs.config) or LENGTH
        ids_N = torch.tensor(tiny.documents([length])[0])
        with torch.no_grad():
            expected = theirs(input_ids=ids_N[None]).logits[0]
    except Exception:  # as above
        return None
    window = getattr(theirs.config, "sliding_window", None) or 0
    specs = [spec for _, block in model.blocks(0) for spec in block.mixer_specs()]
    windows = {spec.window for spec in specs if isinstance(spec, KeyValues)}
    if windows - {0, window}:
        return f"attention has a window of {max(windows)}, and in transformers' class of {window}"
    state = state_for(model, theirs)
    with torch.no_grad():
        x_ND = model.embedded(ids_N, state[model.embed.hf_name])
        found = logits_of(model, tiny.tensor_source(state), x_ND, ids_N)
    error = tiny.relative_error(found, expected)
    return f"logits: relative error {error:.1e} is above {TOLERANCE}" if not error <= TOLERANCE else ""


CHECKS = (reads_absent_and_null_keys_as_transformers,)
