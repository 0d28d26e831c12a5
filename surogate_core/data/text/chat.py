"""A tokenizer with its chat template: rendering and encoding without the overhead of one call a row.

Everything that is the same for all rows (special tokens, the text that the template puts around an assistant's turn) is
computed once and kept with the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from surogate_core.data.encoded import RowError
from surogate_core.data.fields import SYSTEM_ROLES, require_unicode
from surogate_core.data.text import bounds
from surogate_core.errors import UserError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

    from surogate_core.data.encoded import EncodeContext
    from surogate_core.data.text.shown import TemplateVerdict

Span = tuple[int, int]
"""Characters [start, end) of a rendered conversation, or tokens of an encoded one."""
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any] | None

LONGEST_REASON = 500
"""Characters that are shown of what a template raises."""

GUARD = "\U0010f0af"
"""Put inside a control token that a message's text spells out, until the text is encoded.

A private-use character: nothing that a keyboard writes.
"""
RESERVED = "\U0010f0a0-\U0010f0af"
"""The private-use characters that mark places in rendered texts, as a range of a regular expression."""

_RESERVED = re.compile(f"[{RESERVED}]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASKED = "\U0010f0a5asked\U0010f0a5"
_ANSWERED = "\U0010f0a5answered\U0010f0a5"
_USER = {"role": "user", "content": _ASKED}
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")
"""What Python writes for an object that has no text of its own."""


class Encoder:
    """One tokenizer's text to ids; the tokenizer is not changed after its first use here, its template apart."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        special = [(i, token) for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        # An unknown token represents text, unless it also ends texts (GPT-2).
        unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
        self.special_ids = (frozenset(tokenizer.all_special_ids) | {i for i, _ in special}) - unknown
        names = {token.content for _, token in special} | set(tokenizer.all_special_tokens)
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = tuple(sorted({name[0] for name in longest_first}))
        plain = [token for _, token in special if not token.single_word]
        self.cut_behind = tuple(token.content for token in plain if not token.rstrip)
        """Special tokens that end what the tokenizer reads as one text."""
        self.cut_before = tuple(token.content for token in plain if not token.lstrip)
        self.named = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        """Names of the special tokens in templates."""
        self.begin, self.end = _around(tokenizer)
        """The ids that the tokenizer puts before and behind every text."""
        self.backend: Tokenizer | None = None
        """The tokenizer below transformers' own, where it gives the same ids."""
        self.is_free_of_prefixes = False
        """Whether a text's beginning is read as any other part of it."""
        if tokenizer.is_fast:
            backend = tokenizer.backend_tokenizer
            # A tokenizer.json may ask for both; transformers switches them off in every call of its own.
            backend.no_truncation()
            backend.no_padding()
            probe = "Does it fit?\n <b>1 2</b> é漢😀" + "".join(longest_first[:4])
            if list(tokenizer(probe, add_special_tokens=False)["input_ids"]) == _alone(backend, probe):
                self.backend = backend
                self.is_free_of_prefixes = _alone(backend, "a\nb") == _alone(backend, "a\n") + _alone(backend, "b")

    def guarded(self, value: Any) -> Any:
        """The value, with a `GUARD` in each control token that a string in it spells out.

        Raises `RowError` for a private-use character that marks places here.
        """
        return self._guard(value) if self._is_notable(value) else value

    def _is_notable(self, value: Any) -> bool:
        if isinstance(value, str):
            if any(beginning in value for beginning in self._beginnings) and self._control.search(value):
                return True
            return not value.isascii() and _RESERVED.search(value) is not None
        if isinstance(value, Mapping):
            return any(self._is_notable(inner) for inner in value.values())
        return isinstance(value, list | tuple) and any(self._is_notable(inner) for inner in value)

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            if _RESERVED.search(value):
                raise RowError("a text has one of the private-use characters U+10F0A0 to U+10F0AF, which mark places")
            return self._control.sub(lambda found: f"{found[0][:1]}{GUARD}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {name: self._guard(inner) for name, inner in value.items()}
        return [self._guard(inner) for inner in value] if isinstance(value, list | tuple) else value

    def encode_guarded(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids and offsets of a guarded text; offsets are those without the guards.

        What is guarded stays plain text, unless this tokenizer reads a text differently piece by piece.
        """
        assert self.backend is not None
        # Unlike `encode`, `encode_batch` lets other threads run.
        (whole,) = self.backend.encode_batch([text], add_special_tokens=False)
        ids, offsets = whole.ids, whole.offsets
        if GUARD not in text:
            return ids, offsets
        borders = [-1, *(place for place, i in enumerate(ids) if i in self.special_ids), len(ids)]
        found_ids: list[int] = []
        found_offsets: list[Span] = []
        removed = 0  # guards before this place
        for before, after in pairwise(borders):
            start = offsets[before][1] if before >= 0 else 0
            end = offsets[after][0] if after < len(ids) else len(text)
            piece = text[start:end]
            if GUARD in piece:
                plain = self._plain(piece, ids[before + 1 : after])
                if plain is None:
                    whole = self.backend.encode(text.replace(GUARD, ""), add_special_tokens=False)
                    return whole.ids, whole.offsets
                found_ids += plain.ids
                found_offsets += [(a + start - removed, b + start - removed) for a, b in plain.offsets]
                removed += piece.count(GUARD)
            else:
                found_ids += ids[before + 1 : after]
                found_offsets += [(a - removed, b - removed) for a, b in offsets[before + 1 : after]]
            if after < len(ids):
                found_ids.append(ids[after])
                found_offsets.append((offsets[after][0] - removed, offsets[after][1] - removed))
        return found_ids, found_offsets

    def _plain(self, piece: str, expected: list[int]) -> Encoding | None:
        """The piece without guards and without control tokens; None unless a piece alone is read as inside the text."""
        assert self.backend is not None
        if self.backend.encode(piece, add_special_tokens=False).ids != expected:
            return None
        before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        try:
            plain = self.backend.encode(piece.replace(GUARD, ""), add_special_tokens=False)
        finally:
            self.backend.encode_special_tokens = before
        return None if any(i in self.special_ids for i in plain.ids) else plain


def _alone(backend: Tokenizer, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plain, whole = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (False, True))
    at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), len(whole))
    return tuple(whole[:at]), tuple(whole[at + len(plain) :])


_ENCODERS: WeakKeyDictionary[Any, Encoder] = WeakKeyDictionary()
_CHATS: WeakKeyDictionary[Any, dict[str, Chat]] = WeakKeyDictionary()


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The cached properties of the tokenizer."""
    found = _ENCODERS.get(tokenizer)
    if found is None:
        found = _ENCODERS[tokenizer] = Encoder(tokenizer)
    return found


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The text's ids, as the tokenizer itself gives them. `whole_text` is for texts that may begin or end with special
    tokens.
    """
    backend = encoder_of(tokenizer).backend
    if backend is not None:
        # Unlike `encode`, this lets other threads run, and makes no offsets.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    # verbose=False: a text longer than the model's maximum is the packer's business, not worth a warning.
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def chat_of(tokenizer: PreTrainedTokenizerBase, tools: Tools = None) -> Chat:
    """The tokenizer with the chat template that serves these tools.

    Raises `UserError` when it has none, or one that is not Jinja.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"The tokenizer {tokenizer.name_or_path} has no chat template, which conversations need. "
            f"Fix: set `tokenizer` to that of the instruct model of the family, or `template` to one that fits "
            f"the tokenizer's special tokens (chatml, llama3, … or a .jinja file)."
        )
    template = tokenizer.chat_template
    if not isinstance(template, str):
        template = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    chats = _CHATS.setdefault(tokenizer, {})
    found = chats.get(template)
    if found is None:
        found = Chat(tokenizer, template)
        _require_jinja(tokenizer, found)
        chats[template] = found
    return found


def _require_jinja(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> None:
    """Raise `UserError` for a template with a mistake of syntax, which no conversation is to blame for, and for one
    that writes an address of memory, which differs each time.
    """
    from jinja2 import TemplateSyntaxError

    try:
        reason = "it writes an address of memory" if _ADDRESS.search(chat.render([_USER])) else ""
    except RowError as error:
        if not isinstance(cause := error.__cause__, TemplateSyntaxError):
            return
        reason = f"line {cause.lineno}: {printable((cause.message or 'a mistake')[:LONGEST_REASON]).rstrip('.')}"
    if reason:
        raise UserError(
            f"The chat template of the tokenizer {tokenizer.name_or_path}: {reason}. "
            f"Fix: correct it there, or set `template` to one that fits the tokenizer's special tokens (chatml, "
            f"llama3, … or a .jinja file)."
        )


@cache
def _renderer() -> Callable[..., Any] | None:
    """What `apply_chat_template` renders by, without the copies that it makes of every row; None where it is gone."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        return None
    return render_jinja_template


@dataclass(frozen=True, slots=True)
class Frame:
    """The texts that the template puts around an assistant's turn."""

    opening: str
    """The generation prompt, empty where the template has none."""
    ending: str
    """The text that ends a turn, without the white space behind it; empty where there is none."""
    closing: str
    """The text that the template adds after the ending of the last turn only."""


class Chat:
    """A tokenizer with one chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str):
        self._tokenizer = ref(tokenizer)  # a strong reference would keep the tokenizer in the table of chats for ever
        self.encoder = encoder_of(tokenizer)
        self.template = template
        self.marks_turns = _GENERATION.search(template) is not None and tokenizer.is_fast and _renderer() is not None
        """Whether the template has generation blocks."""
        self._frame: Frame | None = None
        self._takes_system: bool | None = None
        self.verdicts: dict[Hashable, TemplateVerdict] = {}
        """What the template does with conversations of a shape: see `shown`."""

    def render(self, messages: Messages, tools: Tools = None, *, add_generation_prompt: bool = False) -> str:
        """The conversation as the template writes it. Raises `RowError` when the template refuses it."""
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt)[0]

    def render_marked(self, messages: Messages, tools: Tools = None) -> tuple[str, list[Span]]:
        """The conversation and its generation blocks, in a template that has them."""
        text, spans = self._render(messages, tools, marked=True)
        return text, [(start, end) for start, end in spans if start < end]

    def _render(
        self, messages: Messages, tools: Tools, *, add_generation_prompt: bool = False, marked: bool = False
    ) -> tuple[str, list[Span]]:
        options = {
            "tools": list(tools) if tools else None,
            "chat_template": self.template,
            "add_generation_prompt": add_generation_prompt,
        }
        render = _renderer()
        spans: list[Span] = []
        try:
            if render is not None:
                options["chat_template"] = bounds.bounded(self.template)
                (text,), found = render(
                    conversations=[list(messages)],
                    return_assistant_tokens_mask=marked,
                    **options,
                    **self.encoder.named,
                )
                spans = list(found[0]) if marked else []
            else:
                tokenizer: Any = self._tokenizer()
                text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            bounds.check(text, messages, tools)
        except Exception as error:  # a template may raise anything: jinja2's errors, TypeError on an odd row, …
            reason = str(error).strip().splitlines() or [type(error).__name__]
            shown = printable(reason[0][:LONGEST_REASON])  # a template may raise with any text
            raise RowError(f"the chat template refuses the conversation: {shown}") from error
        require_unicode(text, "the rendered conversation")
        return text, spans

    def takes_system(self) -> bool:
        """Whether the template shows a system turn. A template that raises counts as showing it: its error is reported
        for the row.
        """
        if self._takes_system is None:
            user, assistant = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
            try:
                text = self.render([{"role": "system", "content": _ASKED}, user, assistant])
            except RowError:
                text = _ASKED
            self._takes_system = _ASKED in text
        return self._takes_system

    def frame(self) -> Frame:
        """The texts that the template puts around an assistant's turn, found by rendering samples."""
        if self._frame is None:
            self._frame = self._find_frame()
        return self._frame

    def _find_frame(self) -> Frame:
        user, assistant = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _ANSWERED}
        nothing = Frame(opening="", ending="", closing="")
        try:
            asked = self.render([user])
            prompted = self.render([user], add_generation_prompt=True)
            _, _, last = self.render([user, assistant]).partition(_ANSWERED)
            _, _, inner = self.render([user, assistant, user]).partition(_ANSWERED)
        except RowError:
            return nothing
        if self.encoder.backend is None:
            return nothing
        ending = last[: self._shared(last, inner)].rstrip()
        return Frame(
            opening=prompted[self._shared(prompted, asked) :], ending=ending, closing=last[len(ending) :].strip()
        )

    def _shared(self, a: str, b: str) -> int:
        """Characters of `a` before the first token in which the texts differ: half a token is no border."""
        assert self.encoder.backend is not None
        first, second = (self.encoder.backend.encode(text, add_special_tokens=False) for text in (a, b))
        for place, (x, y) in enumerate(zip(first.ids, second.ids, strict=False)):
            if x != y:
                return int(first.offsets[place][0])
        if len(first.ids) > len(second.ids):
            return int(first.offsets[len(second.ids)][0])
        return len(a)

    def encode(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int32], list[Span]]:
        """The rendered text's ids, and the tokens that have a character in each of the ascending spans.

        The text after a generation prompt is encoded separately from it, as in generation.
        """
        encoder = self.encoder
        if encoder.backend is None:
            return self._encode_slowly(text, spans)
        borders = [place for span in spans for place in span]
        cuts = [place for place in borders if self._may_cut(text, place)]
        places = [0, *dict.fromkeys(place for place in cuts if 0 < place < len(text)), len(text)]
        parts = [text[start:end] for start, end in pairwise(places)]
        if len(cuts) == len(borders) and GUARD not in text:
            # No offsets are needed, and the tokenizer is a third faster without them.
            encodings = encoder.backend.encode_batch_fast(parts, add_special_tokens=False)
            ids = [i for encoding in encodings for i in encoding.ids] if len(encodings) > 1 else encodings[0].ids
            token_at = dict(zip(places, accumulate(map(len, encodings), initial=0), strict=True))
            return np.asarray(ids, np.int32), [(token_at[start], token_at[end]) for start, end in spans]
        found_ids: list[int] = []
        offsets: list[Span] = []
        at = 0
        for part in parts:
            part_ids, part_offsets = encoder.encode_guarded(part)
            found_ids += part_ids
            offsets += [(start + at, end + at) for start, end in part_offsets]
            at += len(part) - part.count(GUARD)
        return np.asarray(found_ids, np.int32), _tokens_of(offsets, [_unguarded(text, span) for span in spans])

    def _may_cut(self, text: str, place: int) -> bool:
        """Whether the halves of the text have the same tokens apart and together, or must be tokenised apart."""
        encoder = self.encoder
        if not encoder.is_free_of_prefixes:
            return False
        opening = self.frame().opening
        return (
            place in (0, len(text))
            or (bool(opening) and text.endswith(opening, 0, place))
            or text.endswith(encoder.cut_behind, 0, place)
            or text.startswith(encoder.cut_before, place)
        )

    def _encode_slowly(self, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int32], list[Span]]:
        """For tokenizers without offsets: the whole text if offsets can be derived, otherwise part by part."""
        text, spans = text.replace(GUARD, ""), [_unguarded(text, span) for span in spans]
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        if tokenizer.is_fast:
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return np.asarray(encoded["input_ids"], np.int32), _tokens_of(encoded["offset_mapping"], spans)
        return encode_by_pieces(tokenizer, text, spans)


def encode_by_pieces(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[Span]
) -> tuple[NDArray[np.int32], list[Span]]:
    """The ids of the spans and of the text between them, each encoded alone, and the ranges of the spans' ids."""
    ids: list[int] = []
    found: list[Span] = []
    at = 0
    for start, end in (*spans, (len(text), len(text))):
        ids += _ids(tokenizer, text[at:start])
        before = len(ids)
        ids += _ids(tokenizer, text[start:end])
        found.append((before, len(ids)))
        at = end
    return np.asarray(ids, np.int32), found[:-1]


def _ids(tokenizer: PreTrainedTokenizerBase, part: str) -> list[int]:
    return list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]) if part else []


def _unguarded(text: str, span: Span) -> Span:
    start, end = span
    return start - text.count(GUARD, 0, start), end - text.count(GUARD, 0, end)


def _tokens_of(offsets: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """The tokens with a character in each of the spans."""
    places = np.asarray(offsets, np.int64).reshape(-1, 2)
    # Empty tokens (a byte of a character that the token before it covers) may break the order; running maxima restore
    # it.
    starts, ends = np.maximum.accumulate(places[:, 0]), np.maximum.accumulate(places[:, 1])
    return [
        (int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(starts, end, side="left")))
        for start, end in spans
    ]


def with_default_system(
    messages: list[dict[str, Any]], context: EncodeContext, tools: Sequence[Any] | None = None
) -> None:
    """Put the configuration's system prompt before messages that have none.

    Raises `RowError` when the chat template would leave it out.
    """
    if not (context.system or "").strip() or (messages and messages[0]["role"] in SYSTEM_ROLES):
        return
    if not chat_of(context.tokenizer, tools).takes_system():
        raise RowError("the chat template drops system prompts, so `system` would have no effect; set it to null")
    messages.insert(0, {"role": "system", "content": context.system})
