"""Tool calls in the completions of a model: where they end, and which special tokens they are written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surogate_core.bundles import ToolParserSpec
from surogate_core.data.text.chat import chat_of
from surogate_core.inference.completions import GrowingText
from surogate_core.tools.choosing import Tools, functions_of, parser_of
from surogate_core.tools.reading import Call, CallReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.plugins.registry import Registry


def tag_ids(tokenizer: PreTrainedTokenizerBase, tags: Sequence[str]) -> frozenset[int]:
    """The special tokens among the tags of a form, which are part of the text that a parser reads."""
    known = {str(one.content): token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    return frozenset(known[tag] for tag in tags if tag in known)


class OneCall(GrowingText):
    """A completion that ends behind its first call."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stop: Sequence[str],
        *,
        shown: frozenset[int],
        reader: CallReader,
    ):
        super().__init__(tokenizer, prompt, stop, shown=shown)
        self._reader = reader

    def take(self, token: int) -> bool:
        """Add a token; whether a stop text or a call is complete."""
        stopped = super().take(token)
        self._reader.feed(self.settled(stopped))
        return stopped or self._reader.over


class Calling:
    """The tool calls of a prompt with tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: ToolParserSpec, tools: Tools):
        self._spec, self._functions = spec, functions_of(tools)
        self.shown = tag_ids(tokenizer, spec.tags)
        """See `GrowingText`."""

    def reader(self) -> CallReader:
        """What finds the calls in one completion."""
        return CallReader(self._spec, self._functions)

    def read(self, text: str) -> tuple[str, tuple[Call, ...]]:
        """(the content, the calls) of a whole completion."""
        reader = self.reader()
        reader.feed(text)
        reader.close()
        return reader.content, tuple(reader.calls)


def calling(
    registry: Registry, tokenizer: PreTrainedTokenizerBase, tools: Tools, *, name: str = "", key: str = "--tool-parser"
) -> Calling | None:
    """How a model calls these tools; None if there are none, or no parser reads what the chat template writes.

    `name`: the parser, by default the one that fits the template. Raises `UserError` for a name that is none.
    """
    if not tools:
        return None
    spec = parser_of(registry.all("tool_parser"), chat_of(tokenizer, tools).template, name=name, key=key)
    return None if spec is None else Calling(tokenizer, spec, tools)
