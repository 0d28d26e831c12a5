"""Checks on what a data set format returns for every row; an error is the plugin's, and names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from surogate_core.batch import IGNORE_LABEL
from surogate_core.bundles import DatasetFormat
from surogate_core.data.encoded import EncodeContext, Encoded, Group, RowError, members
from surogate_core.errors import SurogateError


class FormatError(RuntimeError):
    """A format failed or returned something invalid: a bug of its plugin, which the message names."""


def encoded(spec: DatasetFormat, row: Mapping[str, Any], options: Any, context: EncodeContext) -> Encoded | Group:
    """Encode a row with its format.

    Raises `RowError` for a row that is unusable, and `FormatError` for anything else that the format raises, for a
    result that is neither an `Encoded` of int32 nor a `Group` of them, for an id that the tokenizer does not have, and
    for labels that differ from the ids.
    """
    assert spec.encode is not None
    try:
        found = spec.encode(row, options, context)
    except (RowError, SurogateError):
        raise
    except RecursionError as error:
        raise RowError("nested too deeply") from error
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise FormatError(f"{_named(spec)}: {type(error).__name__}: {text}") from error
    for document in members(found):
        fault = fault_of(document, len(context.tokenizer))
        if fault and "vocabulary" in fault:
            # Token ids may have gaps; checking for them is slow, so it happens only here.
            fault = fault_of(document, 1 + max(context.tokenizer.get_vocab().values()))
        if fault:
            raise FormatError(f"{_named(spec)}: {fault}")
    return found


def fault_of(document: object, vocabulary: int) -> str:
    """The fault of a document that `encode` returned, or None. `vocabulary`: one more than the largest id."""
    if not isinstance(document, Encoded):
        return f"encode returned {type(document).__name__}, not Encoded or Group"
    ids, labels = document.input_ids, document.labels
    for name, values in (("input_ids", ids), ("labels", labels)):
        if values.dtype != np.int32:
            return f"{name} are {values.dtype}, not int32"
    if len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        worst = ids.min() if ids.min() < 0 else ids.max()
        return f"an id is not in the vocabulary: {worst} of {vocabulary} tokens"
    if not np.all((labels == ids) | (labels == IGNORE_LABEL)):
        return "a label is not its own token: labels are not shifted, labels[i] is input_ids[i] or -100"
    return ""


def _named(spec: DatasetFormat) -> str:
    from surogate_core.plugins.discovery import installed_plugins

    module = str(getattr(spec.encode, "__module__", ""))
    top = module.partition(".")[0]
    owner = next((p.label for p in installed_plugins() if p.module.partition(":")[0].partition(".")[0] == top), "")
    return f"{owner or f'module {module}'}, data set type {spec.name!r}"
