"""Type `text`: one field of plain text; every token is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, fields

if TYPE_CHECKING:
    from surogate_core.plugin import EncodeContext, Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Fields of a data set of type `text`."""

    text_field: str = "text"
    """Field of the row that holds the text."""


def columns(options: TextOptions) -> set[str]:
    """The field of a row that is read."""
    return {options.text_field}


def encode(row: Mapping[str, Any], options: TextOptions, context: EncodeContext) -> Encoded:
    """The text with the tokenizer's own special tokens, and its end-of-text token at the end, each once.

    Raises `RowError` when the field is missing, not a string or empty.
    """
    from surogate_core.plugin import Encoded, encoding

    return Encoded.from_mask(
        encoding.encode_whole(context.tokenizer, fields.required_text(row, options.text_field), ended=True)
    )


FORMAT = bundles.DatasetFormat(
    name="text",
    options=TextOptions,
    encode=encode,
    columns=columns,
    trains_prompts=True,
    version=2,
    examples=(({"text": "Some words."}, {}),),
)
