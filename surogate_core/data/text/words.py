"""Looks for the words of a conversation in its rendering. A template may look into a text and drop a part of it: what
stands outside of a tag, after a separator, or past a length.

White space does not count. The texts are searched in their order, each from the end of the one before, so the search
costs one pass over the rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import unescape
from typing import Any

_BACKSLASHES = re.compile(r"\\[nrt]|\\|\s")

Piece = tuple[int, str, str]
"""Message, property and text that must be shown."""


class Rendering:
    """A rendered conversation that is searched for texts."""

    def __init__(self, text: str):
        self.text = text
        self._at = 0
        self._forms: dict[Callable[[str], str], str] = {}

    def _as(self, form: Callable[[str], str]) -> str:
        """The rendering in a form, made once."""
        if form not in self._forms:
            self._forms[form] = form(self.text)
        return self._forms[form]

    def lacking(self, contents: Sequence[Piece], moved: Sequence[Piece]) -> list[Piece]:
        """The contents that are not shown. Templates may put those in `moved` elsewhere."""
        out_of_order = [*moved, *(piece for piece in contents if not self._follows(piece[2]))]
        if not out_of_order:
            return []
        every = [text for _, _, text in (*contents, *moved)]
        return [
            piece for piece in out_of_order if not self._is_as_often(piece[2], every) and not self._quotes(piece[2])
        ]

    def has(self, text: str) -> bool:
        """Whether a text is in it, as it is or escaped."""
        return text.strip() in self.text or self._is_as_often(text, [text]) or self._quotes(text)

    def first_lacking(self, text: str) -> str:
        """The first word of a text that is not in it; empty if each is somewhere."""
        return next((word for word in text.split() if word not in self.text), "")

    def _follows(self, text: str) -> bool:
        """Whether the text is behind those before."""
        text = text.strip()
        at = self.text.find(text, self._at)
        if at < 0:
            return False
        self._at = at + len(text)
        return True

    def _is_as_often(self, text: str, every: Sequence[str]) -> bool:
        """Whether the text is in it as often as in all texts, since another one may have the same words."""
        for form in (str.strip, _squeeze, _bare):
            one, shown = form(text), self._as(form)
            if shown.count(one) >= sum(form(other).count(one) for other in every):
                return True
        return False

    def _quotes(self, text: str) -> bool:
        """Whether the text is in it with the escapes of JSON, of JSON in JSON or of Python."""
        text = text.strip()
        found = json.dumps(text, ensure_ascii=False)[1:-1]
        forms = (found, json.dumps(text)[1:-1], json.dumps(found, ensure_ascii=False)[1:-1], repr(text)[1:-1])
        return any(form != text and form in self.text for form in forms)


def leaves(value: Any) -> Iterator[str]:
    """The names, texts and numbers in a value, as texts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _bare(text: str) -> str:
    """The text without the escapes of HTML, those with backslashes, and white space.

    A template may escape all or some characters of a text that has escapes already.
    """
    return _BACKSLASHES.sub("", unescape(unescape(text)))
