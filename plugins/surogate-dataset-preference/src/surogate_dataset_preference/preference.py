"""Type `preference`: a prompt with a chosen and a rejected answer, both tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.bundles import DatasetFormat
from surogate_core.data.chat import with_default_system
from surogate_core.data.encoded import RowError
from surogate_core.data.fields import required_text

if TYPE_CHECKING:
    from surogate_core.data.encoded import EncodeContext, Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceOptions:
    """Fields of a data set of type `preference`."""

    prompt_field: str = "prompt"
    """Field of the row that holds the prompt."""
    chosen_field: str = "chosen"
    """Field that holds the preferred answer."""
    rejected_field: str = "rejected"
    """Field that holds the other answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """The two documents of a row; they begin with the same prompt."""

    chosen: Encoded
    rejected: Encoded


def columns(options: PreferenceOptions) -> set[str]:
    """The fields of a row that are read."""
    return {options.prompt_field, options.chosen_field, options.rejected_field}


def encode_pair(row: Mapping[str, Any], options: PreferenceOptions, context: EncodeContext) -> Pair:
    """The prompt with each answer; of each, the answer and the token that ends it carry labels.

    Raises `RowError` when a field is missing, not a string or empty, when the answers are equal,
    and when the chat template does not take the row.
    """
    prompt = required_text(row, options.prompt_field)
    chosen = required_text(row, options.chosen_field)
    rejected = required_text(row, options.rejected_field)
    if chosen == rejected:
        raise RowError(
            f"fields {options.chosen_field!r} and {options.rejected_field!r} are equal: nothing is preferred"
        )
    return Pair(chosen=_document(prompt, chosen, context), rejected=_document(prompt, rejected, context))


def encode(row: Mapping[str, Any], options: PreferenceOptions, context: EncodeContext) -> Encoded:
    """The chosen answer's document; a row whose rejected answer is unusable is a bad row too."""
    return encode_pair(row, options, context).chosen


def _document(prompt: str, answer: str, context: EncodeContext) -> Encoded:
    from surogate_core.data.labels import tokenize_completion, tokenize_conversation

    if not context.tokenizer.chat_template or not context.use_chat_template:
        return tokenize_completion(context.tokenizer, prompt, answer)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    with_default_system(messages, context)
    return tokenize_conversation(context.tokenizer, messages)


# No task of this version learns from pairs; training on the chosen answers alone would not be what was asked for.
FORMAT = DatasetFormat(
    name="preference",
    options=PreferenceOptions,
    encode=encode,
    columns=columns,
    tasks=(),
    version=3,
    examples=(({"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}, {}),),
)
