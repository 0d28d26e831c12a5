"""The text of a completion while it grows: the bytes of tokens, and the stop texts that end it."""

from __future__ import annotations

import codecs
import re
import weakref
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAD = 8
"""Last tokens of a prompt that say whether a completion begins a text."""
REPLACEMENT = "\ufffd"
Symbol = str | int
"""A character, or the id of a special token."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
KEPT_STOPS = 64
"""Stop texts of a tokenizer whose tables are kept."""


class TokenBytes:
    """The UTF-8 bytes that each token of a tokenizer adds to a text.

    A token may be a part of a character, so its bytes are read from the vocabulary, and not from its decoded text. The
    text of tokens is that of their bytes, one after another.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = weakref.proxy(tokenizer)
        self._inside: dict[int, bytes] = {}
        self._first: dict[int, bytes] = {}
        self._special: dict[int, str] = {}
        self._raw = _raw_bytes()
        self._anchor = self._find_anchor()
        self._anchored = self._decoded(self._anchor)
        self.stop_texts = lru_cache(KEPT_STOPS)(self._stop_texts)
        """A stop text → what is looked for. Completions of a request share it."""

    def inside(self, token: int) -> bytes:
        """What it adds behind other tokens; nothing for a special token."""
        found = self._inside.get(token)
        if found is None:
            whole = self._decoded([*self._anchor, token])
            text = whole[len(self._anchored) :] if whole.startswith(self._anchored) else self._decoded([token])
            found = self._inside[token] = self._bytes_of(token, text)
        return found

    def first(self, token: int) -> bytes:
        """What it adds at the beginning of a text, where a tokenizer may drop a space."""
        found = self._first.get(token)
        if found is None:
            found = self._first[token] = self._bytes_of(token, self._decoded([token]))
        return found

    def special(self, token: int) -> str:
        """The text of a special token, which a completion's text does not have; empty for another token."""
        found = self._special.get(token)
        if found is None:
            text = self._decoded([token], special=True)
            found = self._special[token] = text if text and not self._decoded([token]) else ""
        return found

    def shown(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of a token alone, as log-probabilities name it; special tokens have their text."""
        if special := self.special(token):
            return special, special.encode()
        data = self.inside(token)
        return data.decode("utf-8", "replace"), data

    def begins_text(self, prompt: Sequence[int]) -> bool:
        """Whether nothing before a completion is text."""
        return not self._decoded(prompt[-LEAD:])

    def symbols(self, text: str) -> list[Symbol]:
        """A text as characters and, where it names one, the ids of special tokens."""
        ids, names = self._named
        found: list[Symbol] = []
        for part in names.split(text) if names is not None else [text]:
            found += [ids[part]] if part in ids else part
        return found

    def _stop_texts(self, text: str) -> list[StopText]:
        """The text, and the one with the special tokens that it names, which others may also spell out."""
        named = StopText(self.symbols(text))
        return [StopText(text), named] if named.sees_specials else [named]

    @cached_property
    def _named(self) -> tuple[dict[str, int], re.Pattern[str] | None]:
        """The ids of special tokens by text, and what finds them in a text."""
        ids = {str(one.content): number for number, one in self._tokenizer.added_tokens_decoder.items() if one.special}
        names = "|".join(re.escape(name) for name in sorted(ids, key=len, reverse=True) if name)
        return ids, re.compile(f"({names})") if names else None

    def _bytes_of(self, token: int, text: str) -> bytes:
        if REPLACEMENT in text:
            word = self._tokenizer.convert_ids_to_tokens(token)
            if isinstance(word, str):
                if byte := _BYTE.fullmatch(word):
                    return bytes([int(byte[1], 16)])
                if all(char in self._raw for char in word):
                    raw = bytes(self._raw[char] for char in word)
                    if raw.decode("utf-8", "replace") == text:
                        return raw
        return text.encode("utf-8", "replace")

    def _find_anchor(self) -> list[int]:
        """A token that is a whole word or letter, before which nothing is dropped from the next token."""
        for token in range(len(self._tokenizer)):
            text = self._decoded([token])
            if (
                text.isascii()
                and text.isalnum()
                and not _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token)))
            ):
                return [token]
        return []

    def _decoded(self, ids: Sequence[int], *, special: bool = False) -> str:
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )


def _raw_bytes() -> dict[str, int]:
    """The letter by which a byte-level vocabulary writes each byte: printable Latin-1, others from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + place): byte for place, byte in enumerate(others)}


_TABLES: WeakKeyDictionary[PreTrainedTokenizerBase, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """The bytes of this tokenizer's tokens, which are looked up once."""
    found = _TABLES.get(tokenizer)
    if found is None:
        found = _TABLES[tokenizer] = TokenBytes(tokenizer)
    return found


class StopText:
    """A stop text and the table by which each symbol costs the same, however long the stop text is (Knuth, Morris and
    Pratt 1977, "Fast pattern matching in strings").
    """

    def __init__(self, symbols: Sequence[Symbol]):
        self._symbols = tuple(symbols)
        self.sees_specials = any(isinstance(symbol, int) for symbol in symbols)
        """Whether special tokens count. Without one among its symbols, it is looked for in the text without them."""
        self.characters = list(accumulate((isinstance(symbol, str) for symbol in symbols), initial=0))
        """Characters among its first symbols."""
        self._back = [0] * (len(symbols) + 1)
        for place in range(1, len(symbols)):
            self._back[place + 1] = self.longer(self._back[place], symbols[place])

    def __len__(self) -> int:
        return len(self._symbols)

    def longer(self, begun: int, symbol: Symbol) -> int:
        """Symbols of it that a text ends with, from their number before this symbol."""
        while begun and (begun == len(self._symbols) or self._symbols[begun] != symbol):
            begun = self._back[begun]
        return begun + (self._symbols[begun] == symbol)


class Stop:
    """A stop text that is looked for in a growing text."""

    def __init__(self, text: StopText):
        self._text, self.sees_specials, self._begun = text, text.sees_specials, 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that the stop text may begin with."""
        return self._text.characters[self._begun]

    def take(self, symbol: Symbol) -> bool:
        """Add a symbol; whether the stop text is complete."""
        self._begun = self._text.longer(self._begun, symbol)
        return self._begun == len(self._text)


class GrowingText:
    """The text of a completion while it grows: whole or in parts, it is decoded once.

    The text is that of the tokens' bytes without special tokens, up to the first stop text that is complete.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str],
        *,
        shown: frozenset[int] = frozenset(),
    ):
        """`shown`: special tokens that are part of the text, such as the tags of tool calls."""
        self._tokenizer, self._bytes, self._shown = tokenizer, token_bytes(tokenizer), shown
        self._first = self._bytes.begins_text(prompt)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [Stop(one) for text in stop for one in self._bytes.stop_texts(text)]
        self.ids: list[int] = []
        self._done = 0
        """Tokens that are decoded."""
        self._parts: list[str] = []
        self._read = 0
        """Parts that are in `_tail`, or given."""
        self._tail = ""
        """Text that `settled` holds back."""
        self.given = 0
        """Characters that `settled` has given."""
        self.length = 0
        """Characters of the whole tokens so far, with those of a stop text."""
        self.end: int | None = None
        """Where a stop text begins."""

    def take(self, token: int) -> bool:
        """Add a token; whether a stop text is complete."""
        self.ids.append(token)
        if self._stops:
            self._advance()
        return self.end is not None

    def text(self) -> str:
        """The text so far, up to a stop text."""
        self._advance()
        whole = "".join(self._parts)
        return whole[: self.end] if self.end is not None else whole + self._rest()

    def settled(self, ended: bool) -> str:
        """What is new of the text, without an end that later tokens may change: the bytes of a character, or what may
        become a stop text. All of it once it has `ended`.
        """
        if ended:
            new = self.text()[self.given :]
        else:
            self._advance()
            held = max((stop.held for stop in self._stops), default=0)
            known = self.length - held if self.end is None else self.end
            tail = self._tail + "".join(self._parts[self._read :])
            new, self._tail = tail[: known - self.given], tail[known - self.given :]
            self._read = len(self._parts)
        self.given += len(new)
        return new

    def place(self) -> int:
        """Where the next token's text begins, in characters: inside the text, also behind a stop text."""
        self._advance()
        return self.length if self.end is None else min(self.length, self.end)

    def _rest(self) -> str:
        """The bytes of a character that is not complete."""
        return self._decoder.getstate()[0].decode("utf-8", "replace")

    def _advance(self) -> None:
        """Decode the tokens that are new."""
        for token in self.ids[self._done :] if self.end is None else ():
            special = self._bytes.special(token)
            if special and token not in self._shown:
                self._look((token,))
            else:
                data = self._bytes.first(token) if self._first else self._bytes.inside(token)
                data = special.encode() or data
                self._first = self._first and not data
                new = self._decoder.decode(data)
                self._parts.append(new)
                self._look(new)
                self.length += len(new)
            if self.end is not None:
                break
        self._done = len(self.ids)

    def _look(self, symbols: Sequence[Symbol]) -> None:
        """Look for stop texts in what is new."""
        for place, symbol in enumerate(symbols if self._stops else (), start=self.length + 1):
            special = isinstance(symbol, int)
            ended = [stop for stop in self._stops if (stop.sees_specials or not special) and stop.take(symbol)]
            if ended:
                self.end = place - special - max(stop.held for stop in ended)
                return
