"""Checks of export formats: options, and models that they do not have."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from surogate_core.plugin import UserError, bundles
from surogate_core.service.plugins import field_types
from surogate_testing.check import ensure


def has_options_with_defaults(spec: bundles.ExportFormat) -> None:
    """Every option has a default and is text, a choice of texts or a switch, since it is a flag of the command."""
    without = [f.name for f in fields(spec.options) if f.default is MISSING and f.default_factory is MISSING]
    ensure(not without, f"no default: {', '.join(without)}")
    for name, hint in field_types(spec.options).items():
        ensure(hint is bool or not _is_number(hint), f"{name} is neither text nor a switch")
    ensure(spec.suffix.startswith(".") and len(spec.suffix) > 1, f"the suffix is {spec.suffix!r}, not such as '.bin'")


def refuses_an_unknown_model(spec: bundles.ExportFormat) -> None:
    """A model of a type that it does not know is an error of the user's before a tensor is read."""
    with TemporaryDirectory() as directory:
        read: list[str] = []
        job = bundles.ExportJob(
            name="unknown",
            config={"model_type": "no_such_family"},
            shapes={"model.embed_tokens.weight": (8, 4)},
            dtypes={},
            get=lambda name: read.append(name),  # type: ignore[arg-type,return-value]
            tokenizer=cast("Any", None),
            stop_ids=frozenset(),
            sampling=bundles.Sampling(),
            file=Path(directory) / "file",
            place=Path(directory) / "place",
        )
        try:
            spec.write(job, spec.options())
        except UserError as error:
            ensure("no_such_family" in str(error), f"the error does not name the type of the model: {error}")
        else:
            raise AssertionError("a model of an unknown type was written")
        ensure(not read, f"{read} was read")
        ensure(not list(Path(directory).iterdir()), "it left a file")


def _is_number(hint: Any) -> bool:
    return hint in (int, float)


CHECKS = (has_options_with_defaults, refuses_an_unknown_model)
