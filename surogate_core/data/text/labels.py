"""Decides which tokens of a rendered conversation are trained: the assistant's only.

There are two ways to find them. The ``{% generation %}`` blocks of a template mark them. For any other template, the
conversation is rendered before and after each assistant turn, and the added text is the assistant's (prefix
differencing). If later turns change the rendering of earlier ones (Qwen3 shows its thinking in the last turn only), the
turn's text is found by replacing it with a marker.

This takes three renderings per turn. Replacing all texts of a conversation at once takes only one, and is used if the
text around the markers proves that nothing else has changed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from surogate_core.data.encoded import Encoded, LossScale, RowError
from surogate_core.data.text.chat import Chat, Messages, Span, Tools, chat_of
from surogate_core.data.text.shown import check_shown
from surogate_core.data.text.whole_text import encode_rest, encode_whole

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

LARGEST_WEIGHT = 1e6
"""Largest weight of a message. A larger one is probably a typo and would outweigh the rest of the batch."""

_MARKER = "\U0010f0a3swapped\U0010f0a3"
_MARK = re.compile("\U0010f0a1([0-9]+)\U0010f0a2")
"""Markers of private-use characters, which no message and no template contains."""
_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


class Override(NamedTuple):
    """A message's own statement about its training."""

    train: bool | None = None
    weight: float | None = None

    @classmethod
    def taken_from(cls, message: dict[str, Any]) -> Override:
        """The message's values of `train` or `training`, and `weight` or `loss_scale`; these are removed from it.

        Raises `RowError` for values of another type and for contradictions.
        """
        train = _said(message, ("train", "training"))
        weight = _said(message, ("weight", "loss_scale"))
        if train is not None and not isinstance(train, bool):
            raise RowError(f"train must be true or false, this is {train!r}")
        if weight is not None:
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise RowError(f"weight must be a number, this is {weight!r}")
            if not 0 <= weight <= LARGEST_WEIGHT:
                # An integer of hundreds of digits has no float.
                shown = f"{weight:g}" if isinstance(weight, float) or abs(weight) < 1e100 else "far outside"
                raise RowError(f"weight must be from 0 to {LARGEST_WEIGHT:g}, this is {shown}")
            weight = float(np.float32(weight))
        return cls(train, weight)


def _said(message: dict[str, Any], names: Sequence[str]) -> Any:
    said = {name: value for name in names if (value := message.pop(name, None)) is not None}
    values = list(said.values())
    if len(values) == 2 and values[0] != values[1]:
        raise RowError(" and ".join(f"{name} {value!r}" for name, value in said.items()) + " contradict each other")
    return values[0] if values else None


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools = None,
    *,
    loss_scale: LossScale = "default",
    overrides: Sequence[Override] | None = None,
) -> Encoded:
    """The rendered conversation; `overrides`, one per message, take precedence over `loss_scale`.

    If a message contains the name of a control token, it is encoded as text. Raises `RowError` if the template refuses
    the messages or drops a part of them, or if the assistant's turns cannot be distinguished from the rest, and
    `UserError` if the tokenizer has no chat template.
    """
    chat = chat_of(tokenizer, tools)
    messages, tools = chat.encoder.guarded(list(messages)), chat.encoder.guarded(tools)
    background = float(loss_scale == "all")
    wanted = _wanted_weights(messages, overrides, loss_scale)
    needed = [turn for turn, weight in enumerate(wanted) if weight != background]
    marked: list[Span] = []
    if chat.marks_turns:
        text, marked = chat.render_marked(messages, tools)
        check_shown(chat, messages, tools, text)
        found = _marked_spans(chat, messages, tools, marked, wanted, needed)
        inside = [turn for turn in needed if messages[turn]["role"] != "assistant"]
        found += [(span, turn) for turn, span in _spans(chat, messages, tools, text, inside).items()]
    else:
        text = chat.render(messages, tools)
        check_shown(chat, messages, tools, text)
        found = [(span, turn) for turn, span in _spans(chat, messages, tools, text, needed).items()]
    found.sort()
    if any(start >= end for (start, end), _ in found) or any(a[0][1] > b[0][0] for a, b in pairwise(found)):
        raise RowError(
            "the chat template does not show where the assistant's turns begin and end; "
            "give it {% generation %} markers"
        )
    ids, places = chat.encode(text, [span for span, _ in found])
    weights = np.full(len(ids), background, np.float32)
    for (start, end), (_, turn) in zip(places, found, strict=True):
        weights[start:end] = wanted[turn]
    # The special token that closes a turn is trained also where the template's mask leaves it out: without it the
    # model never learns to stop (unsloth 1290, axolotl 2089).
    special = chat.encoder.special_ids
    for (start, end), (_, turn) in zip(places, found, strict=True):
        is_turn = messages[turn]["role"] == "assistant" and start < end < len(ids)
        if not is_turn or weights[end] != background or int(ids[end]) not in special:
            continue
        last = next((i for i in range(end - 1, start, -1) if not _is_space(tokenizer, ids[i])), start)
        if int(ids[last]) not in special:
            weights[end] = wanted[turn]
    # A turn may have several spans, one of them with nothing but its end token.
    said = {turn for (start, end), (_, turn) in zip(places, found, strict=True) if _has_words(ids[start:end], special)}
    for _, turn in found:
        if turn not in said and wanted[turn] > 0:
            raise RowError(
                f"only control tokens of message {turn + 1} ({messages[turn]['role']}) would be trained; use a "
                f"chat template whose {{% generation %}} blocks contain everything that the assistant writes"
            )
    return Encoded.from_mask(ids, weights=weights)


def _is_space(tokenizer: PreTrainedTokenizerBase, i: np.int32) -> bool:
    return str(tokenizer.decode([int(i)])).isspace()


def _has_words(ids: NDArray[np.int32], special: Container[int]) -> bool:
    return any(int(i) not in special for i in ids)


def tokenize_completion(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Encoded:
    """Plain text; the answer and the end-of-text token after it are trained.

    The prompt is tokenised alone, as in generation.
    """
    prompt_ids = encode_whole(tokenizer, prompt, ended=False)
    ids = encode_whole(tokenizer, prompt + answer, ended=True)
    if ids[: len(prompt_ids)] != prompt_ids:  # a token would lie across the border
        ids = prompt_ids + encode_rest(tokenizer, answer)
    return Encoded.from_mask(ids, np.arange(len(ids)) >= len(prompt_ids))


# ---------------------------------------------------------------------------------- what is wanted


def _wanted_weights(messages: Messages, overrides: Sequence[Override] | None, loss_scale: LossScale) -> list[float]:
    """The loss weight of each message's tokens."""
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    wanted = []
    for place, message in enumerate(messages):
        train, weight = overrides[place] if overrides is not None else Override()
        is_assistant = message["role"] == "assistant"
        if loss_scale == "all":
            usual = True
        else:
            usual = is_assistant and (loss_scale == "default" or place > last_user)
        # A weight alone makes only the assistant's turns trained, because data sets give one to every message.
        trained = train if train is not None else usual or (is_assistant and weight is not None)
        wanted.append((1.0 if weight is None else weight) if trained else 0.0)
    return wanted


# -------------------------------------------------------------------------------- where it is


def _marked_spans(
    chat: Chat, messages: Messages, tools: Tools, marked: list[Span], wanted: list[float], needed: list[int]
) -> list[tuple[Span, int]]:
    """The needed generation blocks of the template, each with its assistant turn."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    wanted_turns = set(needed).intersection(turns)
    if not wanted_turns:
        return []
    if len(marked) == len(turns):
        of_turns = list(zip(marked, turns, strict=True))
    elif len(wanted_turns) == len(turns) and len({wanted[turn] for turn in turns}) == 1:
        return [(span, turns[0]) for span in marked]  # all weigh the same, so it does not matter whose each is
    else:
        # Several blocks a turn: how many a conversation has that ends with this turn.
        counts = [0, *(len(chat.render_marked(messages[: turn + 1], tools)[1]) for turn in turns)]
        if counts != sorted(counts) or counts[-1] != len(marked):
            raise RowError("the chat template's {% generation %} blocks do not show which turn each is of")
        of_turns = [(span, turn) for turn, (a, b) in zip(turns, pairwise(counts), strict=True) for span in marked[a:b]]
    return [(span, turn) for span, turn in of_turns if turn in wanted_turns]


def _spans(chat: Chat, messages: Messages, tools: Tools, text: str, needed: Sequence[int]) -> dict[int, Span]:
    """The spans of the needed messages: an assistant's turn with its end token, the content of any other turn."""
    if not needed:
        return {}
    found = _all_at_once(chat, messages, tools, text, needed)
    return found if found is not None else _one_by_one(chat, messages, tools, text, needed)


def _all_at_once(
    chat: Chat, messages: Messages, tools: Tools, text: str, needed: Sequence[int]
) -> dict[int, Span] | None:
    """The spans from one rendering with all needed contents replaced; None if it is not conclusive."""
    frame = chat.frame()
    if not frame.ending:
        return None
    swapped: list[Mapping[str, Any]] = list(messages)
    contents: dict[int, str] = {}
    for turn in needed:
        parts = _swap(messages[turn], turn, has_opening=bool(frame.opening))
        if parts is None:
            return None
        content, texts = parts
        swapped[turn] = {**messages[turn], "content": content}
        contents |= texts
    if _spells(swapped, frame.opening) or _spells_beside(messages, needed, frame.ending):
        return None
    try:
        other = _MARK.split(chat.render(swapped, tools))
    except RowError:  # a template may look into contents
        return None
    places = _match(text, other, contents)
    if places is None:
        return None

    found: dict[int, Span] = {}
    at_end = {end: following for following, end in zip(other[2::2], (e for _, e in places.values()), strict=True)}
    before = 0  # the end of the text swapped last
    for number, (start, end) in places.items():
        turn, is_content = number // 2, number % 2 == 0
        if messages[turn]["role"] != "assistant":
            found[turn] = (start, end)
        else:
            if turn not in found:
                if frame.opening:
                    opening = text.rfind(frame.opening, before, start)
                    if opening < 0:
                        return None
                    start = opening + len(frame.opening)
                found[turn] = (start, end)
            if is_content:
                following = at_end[end]
                ending = following.find(frame.ending)
                if ending < 0 or (ending > 0 and messages[turn].keys() <= {"role", "content"}):
                    return None
                found[turn] = (found[turn][0], end + ending + len(frame.ending))
        before = end
    return found if all(2 * turn in places for turn in needed) else None


def _swap(message: Mapping[str, Any], turn: int, *, has_opening: bool) -> tuple[str, dict[int, str]] | None:
    """A content made of markers, and the text that each of them replaces; None if there is nothing to replace."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return None
    if message["role"] == "assistant":
        if not has_opening and not message.keys() <= {"role", "content"}:
            return None  # the part of the turn that is rendered before the content would be missing
        thinking = _THINKING.fullmatch(content) if "<think>" in content else None
        if thinking is not None and has_opening:
            # Templates parse thinking, so the tags must stay; markers replace the text inside and after them.
            thought, rest = thinking.groups()
            if not thought.strip() or not rest.strip() or "<think>" in rest or "</think>" in rest:
                return None
            inner, outer = 2 * turn + 1, 2 * turn
            marked = f"<think>\n{_mark(inner)}\n</think>\n\n{_mark(outer)}"
            return marked, {inner: thought, outer: rest}
    return _mark(2 * turn), {2 * turn: content}


def _mark(number: int) -> str:
    return f"\U0010f0a1{number}\U0010f0a2"


def _match(text: str, other: Sequence[str], contents: Mapping[int, str]) -> dict[int, Span] | None:
    """The span of each replaced text, in order; None unless substitution gives exactly the real text."""
    if not text.startswith(other[0]):
        return None
    at = len(other[0])
    places: dict[int, Span] = {}
    for number, following in zip(map(int, other[1::2]), other[2::2], strict=True):
        if number in places or number not in contents:
            return None
        for form in _forms(contents[number]):
            end = at + len(form)
            if text.startswith(form, at) and text.startswith(following, end):
                break
        else:
            return None
        places[number] = (at, end)
        at = end + len(following)
    return places if at == len(text) else None


def _forms(content: str) -> Iterable[str]:
    """The forms in which templates write the content: unchanged, or stripped of white space."""
    yield content
    if content != content.strip() or content[:1] == "\n" or content[-1:] == "\n":
        yield from dict.fromkeys(
            (content.strip(), content.lstrip("\n"), content.strip("\n"), content.lstrip(), content.rstrip())
        )


def _one_by_one(chat: Chat, messages: Messages, tools: Tools, text: str, needed: Sequence[int]) -> dict[int, Span]:
    found: dict[int, Span] = {}
    before = 0
    for turn in needed:
        if messages[turn]["role"] == "assistant":
            found[turn] = _turn_span(chat, messages, tools, text, turn, before)
        else:
            found[turn] = _content_span(chat, messages, tools, text, turn)
        before = found[turn][1]
    return found


def _turn_span(chat: Chat, messages: Messages, tools: Tools, text: str, turn: int, earliest: int) -> Span:
    """The span of the assistant's `turn` in the rendered conversation, its end token included."""
    frame = chat.frame()
    before = _prefix(chat, messages[:turn], tools, text, add_generation_prompt=True)
    if before is not None and before == _prefix(chat, messages[:turn], tools, text):
        before = None  # the template has no generation prompt that separates a turn's header from its text
    is_last = turn == len(messages) - 1
    after = text if is_last else _prefix(chat, messages[: turn + 1], tools, text)
    if before is None or after is None:
        swapped = [*messages]
        swapped[turn] = {"role": "assistant", "content": _MARKER}
        other = chat.render(swapped, tools)
        if _MARKER not in other:
            raise RowError(f"the chat template drops message {turn + 1}, an assistant turn")
    if before is not None:
        start = len(before)
    else:
        start = _common(text, other)
        opening = text.rfind(frame.opening, earliest, start) if frame.opening else -1
        if opening >= 0 and not _spells(messages, frame.opening):
            start = opening + len(frame.opening)
    if after is None:
        end = len(text) - _common(text[::-1], other[::-1])
        if frame.ending and text.startswith(frame.ending, end):
            return start, end + len(frame.ending)
    else:
        end = len(after)
    # Line breaks between turns belong to the template, not to the assistant.
    turn_text = text[start:end].rstrip()
    if is_last and frame.closing and turn_text.endswith(frame.closing):
        turn_text = turn_text.removesuffix(frame.closing).rstrip()
    return start, start + len(turn_text)


def _content_span(chat: Chat, messages: Messages, tools: Tools, text: str, turn: int) -> Span:
    """The span of the content of a turn of another role in the rendered conversation."""
    swapped = [*messages]
    swapped[turn] = {**messages[turn], "content": _MARKER}
    try:
        other = chat.render(swapped, tools)
    except RowError:
        other = ""
    start = _common(text, other)
    end = len(text) - _common(text[::-1], other[::-1])
    if other.count(_MARKER) != 1 or text[start:end] not in _forms(messages[turn]["content"]):
        raise RowError(
            f"message {turn + 1} ({messages[turn]['role']}) has another weight than its neighbours, "
            f"but the chat template does not show where its content is"
        )
    return start, end


def _common(a: str, b: str) -> int:
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _prefix(
    chat: Chat, messages: Messages, tools: Tools, text: str, *, add_generation_prompt: bool = False
) -> str | None:
    """The rendering of the first messages, if the whole conversation begins with it."""
    if not messages:
        return None
    try:
        rendered = chat.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except RowError:  # some templates want a user turn, or turns in pairs
        return None
    return rendered if text.startswith(rendered) else None


def _spells(value: Any, text: str) -> bool:
    """Whether a string in the value has the text in it."""
    if not text:
        return False
    if isinstance(value, str):
        return text in value
    if isinstance(value, Mapping):
        return any(_spells(inner, text) for inner in value.values())
    return isinstance(value, list | tuple) and any(_spells(inner, text) for inner in value)


def _spells_beside(messages: Messages, needed: Sequence[int], text: str) -> bool:
    """Whether one of the needed messages has the text outside its content."""
    return any(
        _spells(value, text)
        for turn in needed
        for name, value in messages[turn].items()
        if name not in ("role", "content")
    )
