"""Requests as tokens: their sizes are checked, and one thread reads and tokenises them, the smallest first.

Tokenising releases the interpreter, so that the server answers meanwhile. One thread, because a tokenizer has state.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import count
from queue import PriorityQueue
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from surogate_command_serve.asks import Ask, RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_command_serve.models import ServedModel

T = TypeVar("T")
FRAME = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments"))
"""Keys of messages and calls, which a chat template need not write."""


class Preparer:
    """A thread that calls functions, the smallest first, until it is closed. Sizes up to twice as large are alike."""

    def __init__(self) -> None:
        self._waiting: PriorityQueue[tuple[int, int, list[Callable[[], Any]], Future[Any]]] = PriorityQueue()
        self._count = count()
        self._thread = threading.Thread(target=self._run, name="surogate-prepare", daemon=True)
        self._thread.start()

    async def call(self, size: int, function: Callable[[], T]) -> T:
        """The result of a function; one that is cancelled before its turn is dropped, with the body that it has."""
        future: Future[T] = Future()
        held: list[Callable[[], Any]] = [function]
        future.add_done_callback(lambda done: held.clear())
        self._waiting.put((size.bit_length(), next(self._count), held, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread, when it has done what it does."""
        self._waiting.put((-1, next(self._count), [], Future()))
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            size, _, held, future = self._waiting.get()
            if size < 0:
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(held.pop()())
                except BaseException as error:  # also the panics of a tokenizer, which are no `Exception`
                    future.set_exception(error)
            del held, future


def check_sizes(model: ServedModel, ask: Ask) -> None:
    """Refuse what cannot fit before it is tokenised; raises `RequestError`.

    A text of more bytes than the context's tokens can have is too long; so are more messages than tokens.
    """
    most = model.context * longest_token(model.tokenizer)
    if ask.chat:
        if len(ask.messages) > model.context:
            raise _too_long(model, "messages", f"has {len(ask.messages):,} messages")
        for name, values in (("messages", ask.messages), ("tools", ask.offer.tools)):
            size = _text_bytes(values)
            if size > most:
                raise _too_long(model, name, f"has {size:,} bytes of text")
    for prompt in ask.prompts:
        if isinstance(prompt, str):
            size = len(prompt.encode())
            if size > most:
                raise _too_long(model, "prompt", f"has {size:,} bytes")
        elif len(prompt) >= model.context:
            raise _too_long(model, "prompt", f"has {len(prompt):,} tokens")


def _text_bytes(value: Any) -> int:
    """The bytes of the texts, keys and numbers in a JSON value, however deep it is."""
    size, level = 0, [value]
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                size += sum(len(_encoded(key)) for key in one if key not in FRAME)
                inner += one.values()
            elif isinstance(one, list | tuple):
                inner += one
            elif one is not None:
                size += len(_encoded(str(one)))
        level = inner
    return size


def _encoded(text: str) -> bytes:
    """A text in UTF-8. Arguments that were written as JSON text may have half of a surrogate pair, refused later."""
    return text.encode("utf-8", "surrogatepass")


def _too_long(model: ServedModel, name: str, what: str) -> RequestError:
    more = ", or start the server with a larger --context" if model.context < model.prepared.context else ""
    return RequestError(
        f"{name}: {what}, and there is room for {model.context:,} tokens with the completion. Fix: shorten it{more}.",
        param=name,
        code="context_length_exceeded",
    )


_LONGEST: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Bytes of the longest token, or a little more: a vocabulary writes some bytes as letters of two."""
    found = _LONGEST.get(tokenizer)
    if found is None:
        found = _LONGEST[tokenizer] = max(len(str(word).encode("utf-8", "replace")) for word in tokenizer.get_vocab())
    return found
