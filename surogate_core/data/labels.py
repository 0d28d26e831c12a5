"""Which tokens of a rendered conversation are trained: the assistant's, and nobody else's.

Two ways to find them. A template with ``{% generation %}`` blocks says itself. Any other is asked
what it renders before and after each assistant turn: what the turn adds is the assistant's
(prefix differencing). Where later turns change how earlier ones are rendered (Qwen3 shows its
thinking in the last turn only), the turn's text is found by swapping it for a marker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from surogate_core.data.fields import require_unicode
from surogate_core.data.tokenize import RowError
from surogate_core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "\ue0a0surogate\ue0a0"
"""Private-use characters: no text and no template has them."""


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
) -> tuple[list[int], list[bool]]:
    """(input_ids, trained) of a conversation, equally long.

    Raises `RowError` when the template refuses the messages and when the assistant's turns cannot
    be told from the rest, `UserError` when the tokenizer has no chat template at all.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"The tokenizer {tokenizer.name_or_path} has no chat template, which conversations need. "
            f"Fix: set `tokenizer` to that of the instruct model of the family, or add chat_template.jinja to it."
        )
    template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    if _GENERATION.search(template) and tokenizer.is_fast:
        ids, trained = _by_generation_mask(tokenizer, messages, tools)
    else:
        ids, trained = _by_prefixes(tokenizer, messages, tools)
    return ids, _with_turn_ends(tokenizer, ids, trained)


def tokenize_completion(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> tuple[list[int], list[bool]]:
    """(input_ids, trained) of plain text, equally long: the answer and the end-of-text token after it are trained.

    The prompt's tokens are those that it has alone, as in generation.
    """

    def encode(text: str) -> list[int]:
        # A prompt that writes the first special token itself must not get it twice.
        own = bool(tokenizer.bos_token) and prompt.startswith(str(tokenizer.bos_token))
        return list(tokenizer(text, add_special_tokens=not own, verbose=False)["input_ids"])

    eos = tokenizer.eos_token_id
    prompt_ids, ids = encode(prompt), encode(prompt + answer)
    if prompt_ids and prompt_ids[-1] == eos and not prompt.endswith(str(tokenizer.eos_token)):
        prompt_ids.pop()  # this tokenizer ends every text with it
    if ids[: len(prompt_ids)] != prompt_ids:  # a token would lie across the border
        ids = prompt_ids + list(tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
    if isinstance(eos, int) and ids[-1] != eos:
        ids.append(eos)
    return ids, [place >= len(prompt_ids) for place in range(len(ids))]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template([dict(message) for message in messages], **options)
    except Exception as error:  # a template may raise anything: jinja2's errors, TypeError on an odd row, …
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RowError(f"the chat template refuses the conversation: {reason[0]}") from error


def _by_generation_mask(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> tuple[list[int], list[bool]]:
    encoded = _render(
        tokenizer,
        messages,
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
    )
    trained = [bool(mask) for mask in encoded["assistant_masks"]]
    # transformers marks up to the first token of a block's last character; a character outside ASCII may have more.
    for place, ((_, end), (start, _)) in enumerate(pairwise(encoded["offset_mapping"])):
        if trained[place] and start < end:
            trained[place + 1] = True
    return list(encoded["input_ids"]), trained


def _by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> tuple[list[int], list[bool]]:
    text: str = _render(tokenizer, messages, tools=tools, tokenize=False)
    require_unicode(text, "the rendered conversation")
    spans = [
        _turn_span(tokenizer, messages, tools, text, turn)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if any(start >= end for start, end in spans) or any(a[1] > b[0] for a, b in pairwise(spans)):
        raise RowError(
            "the chat template does not show where the assistant's turns begin and end; "
            "give it {% generation %} markers"
        )
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["input_ids"]), _covered(encoded["offset_mapping"], spans)
    return _by_pieces(tokenizer, text, spans)


def _turn_span(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    text: str,
    turn: int,
) -> Span:
    """Where the assistant's `turn` lies in the rendered conversation, its end token included."""
    before = _prefix(tokenizer, messages[:turn], tools, text, add_generation_prompt=True)
    if before is not None and before == _prefix(tokenizer, messages[:turn], tools, text):
        before = None  # the template has no generation prompt to tell a turn's header from its text
    after = text if turn == len(messages) - 1 else _prefix(tokenizer, messages[: turn + 1], tools, text)
    if before is None or after is None:
        swapped = [dict(message) for message in messages]
        swapped[turn] = {"role": "assistant", "content": _MARKER}
        other: str = _render(tokenizer, swapped, tools=tools, tokenize=False)
        if _MARKER not in other:
            raise RowError(f"the chat template leaves out message {turn + 1}, an assistant turn")
    start = len(before) if before is not None else _common(text, other)
    end = len(after) if after is not None else len(text) - _common(text[::-1], other[::-1])
    # Line breaks between turns are the template's, not what the assistant says.
    return start, start + len(text[start:end].rstrip())


def _common(a: str, b: str) -> int:
    """Characters that two texts share at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _prefix(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    text: str,
    **options: Any,
) -> str | None:
    """What the template renders for the first messages, if it is how the whole conversation begins."""
    if not messages:
        return None
    try:
        rendered: str = _render(tokenizer, messages, tools=tools, tokenize=False, **options)
    except RowError:  # some templates want a user turn, or turns in pairs
        return None
    return rendered if text.startswith(rendered) else None


def _covered(offsets: Sequence[Span], spans: Sequence[Span]) -> list[bool]:
    """Whether each token has a character in one of the ascending spans."""
    covered, current = [], 0
    for start, end in offsets:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        covered.append(current < len(spans) and end > spans[current][0] and end > start)
    return covered


def _by_pieces(tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
    """For tokenizers that do not tell where a token lies in the text: encode part by part."""
    ids: list[int] = []
    trained: list[bool] = []
    at = 0
    for start, end in (*spans, (len(text), len(text))):
        for part, mine in ((text[at:start], False), (text[start:end], True)):
            part_ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] if part else []
            ids += part_ids
            trained += [mine] * len(part_ids)
        at = end
    return ids, trained


def _with_turn_ends(tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: list[bool]) -> list[bool]:
    """Train the special token that closes each turn also where the template's mask leaves it out.

    Without it the model never learns to stop (unsloth 1290, axolotl 2089).
    """
    special = set(tokenizer.all_special_ids)
    special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    ends = list(trained)
    for place, (mine, next_mine) in enumerate(pairwise(trained)):
        if mine and not next_mine and ids[place] not in special and ids[place + 1] in special:
            ends[place + 1] = True
    return ends
