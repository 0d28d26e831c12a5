"""Type `auto`: which of the other types most of the sampled rows show, by the names and the shapes of their fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from surogate_core.plugin import RowError, bundles, fields

Row = Mapping[str, Any]

PROMPTS = ("prompt", "instruction", "question", "query")
CHOSEN, REJECTED = ("chosen", "rejected")
COMPLETION, LABEL = ("completion", "label")
SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools",)
TEXTS = ("text", "content")
"""Names of fields, the first that fits is taken."""

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "observation": "tool",
}
"""Role name in ShareGPT and similar formats → the usual name."""


def choose(rows: Sequence[Row], options: bundles.NoOptions) -> bundles.FormatChoice:
    """The first type that more than half of the rows fit. Raises `RowError` when there is none."""
    for rule in (_preference, _unpaired, _openai, _sharegpt, _alpaca, _text):
        for choice in rule(rows):
            return choice
    names = ", ".join(repr(name) for name in dict.fromkeys(name for row in rows for name in row)) or "none"
    raise RowError(
        f"no type fits the {len(rows)} sampled rows, whose fields are {names}; looked for OpenAI messages, ShareGPT "
        f"conversations, instructions with outputs, chosen and rejected answers, judged answers, and text"
    )


def _preference(rows: Sequence[Row]) -> Iterator[bundles.FormatChoice]:
    fits = _count(rows, lambda row: _is_answer(row.get(CHOSEN)) and _is_answer(row.get(REJECTED)))
    prompt = _most(rows, PROMPTS, _is_answer)
    whole = _count(rows, lambda row: all(_holds_prompt(row.get(name)) for name in (CHOSEN, REJECTED)))
    if whole and not prompt:
        yield bundles.FormatChoice(
            type="preference",
            fields={"chosen_field": CHOSEN, "rejected_field": REJECTED},
            reason=f"{whole} rows have conversations in {CHOSEN!r} and {REJECTED!r}",
        )
    if fits and prompt:
        keys = {"prompt_field": prompt, "chosen_field": CHOSEN, "rejected_field": REJECTED}
        yield bundles.FormatChoice(
            type="preference", fields=keys, reason=f"{fits} rows have {prompt!r}, {CHOSEN!r} and {REJECTED!r}"
        )


def _unpaired(rows: Sequence[Row]) -> Iterator[bundles.FormatChoice]:
    fits = _count(
        rows,
        lambda row: isinstance(row.get(LABEL), bool) and all(_is_answer(row.get(n)) for n in (PROMPTS[0], COMPLETION)),
    )
    if fits:
        reason = f"{fits} rows have {PROMPTS[0]!r}, {COMPLETION!r} and {LABEL!r}, which is true or false"
        yield bundles.FormatChoice(type="unpaired", fields={}, reason=reason)


def _openai(rows: Sequence[Row]) -> Iterator[bundles.FormatChoice]:
    name = _most(rows, fields.MESSAGES, lambda value: _are_messages(value, "role"))
    if name:
        shape = f"{_count(rows, lambda row: _are_messages(row.get(name), 'role'))} rows hold messages with 'role'"
        yield _conversation(rows, name, {}, f"{shape} in {name!r}")


def _sharegpt(rows: Sequence[Row]) -> Iterator[bundles.FormatChoice]:
    name = _most(rows, fields.MESSAGES, lambda value: _are_messages(value, "from"))
    if name:
        keys = {"message_property_mappings": {"role": "from", "content": "value"}, "role_mappings": SHAREGPT_ROLES}
        shape = f"{_count(rows, lambda row: _are_messages(row.get(name), 'from'))} rows hold messages with 'from'"
        yield _conversation(rows, name, keys, f"{shape} in {name!r} (ShareGPT)")


def _conversation(rows: Sequence[Row], name: str, more: Mapping[str, Any], reason: str) -> bundles.FormatChoice:
    keys: dict[str, Any] = {"messages_field": name, **more}
    system = next((n for n in SYSTEMS if any(_is_text(row.get(n)) for row in rows)), None)
    if system:
        keys["system_field"] = system
    tools = next((n for n in TOOLS if any(row.get(n) and isinstance(row[n], str | list) for row in rows)), None)
    if tools:
        keys["tools_field"] = tools
    return bundles.FormatChoice(type="conversation", fields=keys, reason=reason)


def _alpaca(rows: Sequence[Row]) -> Iterator[bundles.FormatChoice]:
    instruction, output = _most(rows, fields.INSTRUCTIONS, _is_text), _most(rows, fields.OUTPUTS, _is_text)
    if not instruction or not output:
        return
    keys = {"instruction_field": instruction, "output_field": output}
    given = next((n for n in fields.INPUTS if any(_is_text(row.get(n)) for row in rows)), None)
    if given:
        keys["input_field"] = given
    system = next((n for n in SYSTEMS if any(_is_text(row.get(n)) for row in rows)), None)
    if system:
        keys |= {"system_prompt_type": "field", "system_prompt_field": system}
    fits = _count(rows, lambda row: _is_text(row.get(instruction)) and _is_text(row.get(output)))
    yield bundles.FormatChoice(
        type="instruction", fields=keys, reason=f"{fits} rows have text in {instruction!r} and {output!r} (Alpaca)"
    )


def _text(rows: Sequence[Row]) -> Iterator[bundles.FormatChoice]:
    name = _most(rows, TEXTS, _is_text)
    if name:
        fits = _count(rows, lambda row: _is_text(row.get(name)))
        yield bundles.FormatChoice(
            type="text", fields={"text_field": name}, reason=f"{fits} rows have text in {name!r}"
        )


def _count(rows: Sequence[Row], fits: Callable[[Row], bool]) -> str:
    """How many of how many rows fit, or nothing unless it is more than half."""
    count = sum(fits(row) for row in rows)
    return f"{count} of {len(rows)} sampled" if 2 * count > len(rows) else ""


def _most(rows: Sequence[Row], names: Sequence[str], fits: Callable[[Any], bool]) -> str | None:
    """The first name whose value fits in more than half of the rows."""
    return next((name for name in names if 2 * sum(fits(row.get(name)) for row in rows) > len(rows)), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_answer(value: Any) -> bool:
    return _is_text(value) or _are_messages(value, "role")


def _holds_prompt(value: Any) -> bool:
    """Whether it is a conversation that begins before the answer."""
    return _are_messages(value, "role") and _listed(value)[0]["role"] != "assistant"


def _are_messages(value: Any, role: str) -> bool:
    value = _listed(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and isinstance(message.get(role), str) for message in value)
    )


def _listed(value: Any) -> Any:
    """A list that is written as JSON text, as CSV holds it; another value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


FORMAT = bundles.DatasetFormat(
    name="auto", options=bundles.NoOptions, choose=choose, version=1, examples=(({"text": "Some words."}, {}),)
)
