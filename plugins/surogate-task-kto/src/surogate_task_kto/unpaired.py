"""Type `unpaired`: a prompt, one answer to it, and whether the answer is good."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.plugin import RowError, bundles, encoding, fields

if TYPE_CHECKING:
    from surogate_core.plugin import EncodeContext, Encoded

GOOD, BAD = 1.0, 2.0
"""The weight of the tokens of a good and of a bad answer in the shard cache. Weights are never negative there, so the
weight names the label; the task reads it and gives it to the loss in a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedOptions:
    """Fields of a data set of type `unpaired`."""

    prompt_field: str = "prompt"
    """Field of the row that holds the prompt: text, or a list of messages."""
    completion_field: str = "completion"
    """Field that holds the answer: text, or a list of messages."""
    label_field: str = "label"
    """Field that says whether the answer is good: true or false, or 1 or 0."""


def columns(options: UnpairedOptions) -> set[str]:
    """The fields of a row that are read."""
    return {options.prompt_field, options.completion_field, options.label_field}


def encode(row: Mapping[str, Any], options: UnpairedOptions, context: EncodeContext) -> Encoded:
    """The prompt and the answer; the answer and the token that ends it carry labels, of weight `GOOD` or `BAD`.

    Raises `RowError` when a field is missing or empty, the label is neither true nor false, or the chat template does
    not take the row.
    """
    good = _label(row, options.label_field)
    prompt, answer = (
        encoding.text_or_messages(row, field) for field in (options.prompt_field, options.completion_field)
    )
    encoding.check_answer(answer, options.completion_field)
    document = encoding.encode_answer(prompt, answer, context)
    if good:
        return document
    trained = document.labels != -100
    return replace(document, weights=np.where(trained, np.float32(BAD), np.float32(0)))


def _label(row: Mapping[str, Any], field: str) -> bool:
    value = fields.required(row, field)
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):  # CSV
        return value.strip().lower() in ("true", "1")
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise RowError(f"field {field!r} must be true or false, this is {value!r}")


_MESSAGES = [{"role": "user", "content": "Two and two?"}]

FORMAT = bundles.DatasetFormat(
    name="unpaired",
    options=UnpairedOptions,
    encode=encode,
    columns=columns,
    tasks=("kto",),
    examples=(
        ({"prompt": "Two and two?", "completion": "Four.", "label": True}, {}),
        ({"prompt": _MESSAGES, "completion": [{"role": "assistant", "content": "Five."}], "label": 0}, {}),
    ),
)
