"""Type `preference`: a prompt with a chosen and a rejected answer, both tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import Group, RowError, bundles, encoding, fields

if TYPE_CHECKING:
    from surogate_core.plugin import EncodeContext


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceOptions:
    """Fields of a data set of type `preference`."""

    prompt_field: str | None = "prompt"
    """Field of the row that holds the prompt: text, or a list of messages. Null: both answers are texts that begin with
    it."""
    chosen_field: str = "chosen"
    """Field that holds the preferred answer: text, or a list of messages."""
    rejected_field: str = "rejected"
    """Field that holds the other answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """A row: texts, or messages."""

    prompt: str | encoding.Messages
    chosen: str | encoding.Messages
    rejected: str | encoding.Messages


def columns(options: PreferenceOptions) -> set[str]:
    """The fields of a row that are read."""
    return {options.prompt_field or options.chosen_field, options.chosen_field, options.rejected_field}


def encode(row: Mapping[str, Any], options: PreferenceOptions, context: EncodeContext) -> Group:
    """The prompt with the chosen and with the rejected answer, in this order.

    The answers and the tokens that end them have labels. Raises `RowError` when a field is missing, malformed or empty,
    when the answers are equal or become so, and when the chat template does not take the row; `UserError` for messages
    without a template.
    """
    pair = read_pair(row, options)
    answers = (pair.chosen, pair.rejected)
    group = Group(documents=tuple(encoding.encode_answer(pair.prompt, answer, context) for answer in answers))
    _check_different(group, (options.chosen_field, options.rejected_field), context)
    return group


def _check_different(group: Group, names: Sequence[str], context: EncodeContext) -> None:
    """Raise `RowError` if the documents are equal, or are what is left of them in a row."""
    fields = f"fields {names[0]!r} and {names[1]!r}"
    ids = [document.input_ids.tolist() for document in group.documents]
    if ids[0] == ids[1]:
        raise RowError(f"{fields} are equal as tokens: nothing is preferred")
    settings = encoding.PackSettings(
        sequence_len=context.sequence_len,
        max_length=context.max_length,
        truncation_strategy=context.truncation_strategy,
    )
    cuts = encoding.cut_group([len(one) for one in ids], settings)
    if cuts is not None:
        first, second = (one[start : start + length] for one, (start, length) in zip(ids, cuts, strict=True))
        if first == second:
            raise RowError(
                f"{fields} are equal once they are cut to {len(first)} tokens: nothing is preferred; raise max_length "
                f"or sequence_len"
            )


# ---------------------------------------------------------------------------------------- rows


def read_pair(row: Mapping[str, Any], options: PreferenceOptions) -> PreferencePair:
    """The prompt and both answers. Answers that are whole conversations have the prompt in common."""
    names = (options.chosen_field, options.rejected_field)
    if options.prompt_field is not None and options.prompt_field not in row and not _is_messages(row, names[0]):
        fields.required(row, options.prompt_field)
    chosen, rejected = (encoding.text_or_messages(row, name) for name in names)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError(f"fields {names[0]!r} and {names[1]!r} must both be text or both be messages")
    if chosen == rejected:
        raise RowError(f"fields {names[0]!r} and {names[1]!r} are equal: nothing is preferred")
    if isinstance(chosen, list) and isinstance(rejected, list):
        if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
            return _with_shared_messages(chosen, rejected, names)
    elif options.prompt_field is None:
        assert isinstance(chosen, str)
        assert isinstance(rejected, str)
        return _with_shared_text(chosen, rejected, names)
    if options.prompt_field is None:
        raise RowError(f"fields {names[0]!r} and {names[1]!r} have no prompt; set prompt_field")
    prompt = encoding.text_or_messages(row, options.prompt_field)
    for answer, name in zip((chosen, rejected), names, strict=True):
        encoding.check_answer(answer, name)
    return PreferencePair(prompt=prompt, chosen=chosen, rejected=rejected)


def _is_messages(row: Mapping[str, Any], field: str) -> bool:
    return row.get(field) is not None and not isinstance(encoding.text_or_messages(row, field), str)


def _with_shared_messages(
    chosen: encoding.Messages, rejected: encoding.Messages, names: Sequence[str]
) -> PreferencePair:
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise RowError(f"fields {names[0]!r} and {names[1]!r} begin with different messages: there is no common prompt")
    pair = PreferencePair(prompt=chosen[:shared], chosen=chosen[shared:], rejected=rejected[shared:])
    for answer, name in zip((pair.chosen, pair.rejected), names, strict=True):
        if not answer:
            raise RowError(f"field {name!r} has no message after the common prompt")
        encoding.check_answer(answer, name)
    return pair


def _with_shared_text(chosen: str, rejected: str, names: Sequence[str]) -> PreferencePair:
    pairs = enumerate(zip(chosen, rejected, strict=False))
    prompt = chosen[: next((place for place, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))]
    # Not within a word.
    prompt = prompt[: max((place for place, letter in enumerate(prompt, start=1) if letter.isspace()), default=0)]
    answers = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt.strip():
        raise RowError(f"fields {names[0]!r} and {names[1]!r} begin with different texts: there is no common prompt")
    for answer, name in zip(answers, names, strict=True):
        if not answer.strip():
            raise RowError(f"field {name!r} has no text after the common prompt")
    return PreferencePair(prompt=prompt, chosen=answers[0], rejected=answers[1])


FORMAT = bundles.DatasetFormat(
    name="preference",
    options=PreferenceOptions,
    encode=encode,
    columns=columns,
    tasks=("dpo", "ipo", "orpo", "simpo", "reward"),
    version=5,
    examples=(
        ({"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}, {}),
        (
            {
                "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}],
                "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "What?"}],
            },
            {},
        ),
    ),
)
