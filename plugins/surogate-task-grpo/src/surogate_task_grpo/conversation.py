"""Conversations as tokens: the prompt of a problem, and what an environment adds to the tokens that a model sampled.

Sampled tokens are never encoded again. What follows them is encoded alone, if the chat template writes the longer
conversation as a continuation of the shorter one. Otherwise the conversation is encoded anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import RowError, bundles, encoding, inference

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[Mapping[str, Any]]
_ANSWERED = "It is answered."
"""The text of a reply in a conversation that shows what the template writes behind one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The tokens of a conversation after the environment has answered."""

    ids: tuple[int, ...]
    extends: bool
    """Whether they begin with all tokens of the conversation before."""


class Renderer:
    """Conversations as tokens, by the tokenizer's chat template or, without one, as plain text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, templated: bool, system: str | None, stop_ids: frozenset[int]
    ):
        self.tokenizer, self.system, self.stop_ids = tokenizer, system, stop_ids
        self.templated = templated and bool(tokenizer.chat_template)

    def messages(self, problem: bundles.EnvironmentProblem) -> Messages:
        """The messages of a problem, with the configuration's system message before those that have none."""
        messages = list(problem.messages)
        if self.templated and self.system is not None and messages[0].get("role") != "system":
            return [{"role": "system", "content": self.system}, *messages]
        return messages

    def prompt(self, problem: bundles.EnvironmentProblem) -> tuple[int, ...]:
        """The tokens up to the model's first reply. Raises `RowError` if the template refuses the messages."""
        messages = self.messages(problem)
        if not self.templated:
            text = "\n".join(str(m["content"]) for m in messages)
            return tuple(encoding.encode_whole(self.tokenizer, text, ended=False))
        return self._encode(self._render(messages, problem.tools))

    def text(self, prompt: Sequence[int], reply: Sequence[int]) -> str:
        """The text of a reply's tokens, without the token that ends it."""
        watch = inference.GrowingText(self.tokenizer, prompt, ())
        watch.ids += reply[:-1] if reply and reply[-1] in self.stop_ids else reply
        return watch.text()

    def ending(self) -> tuple[int, ...]:
        """The tokens behind the text of a finished conversation's last reply: what the template writes there, or the
        token that ends a text.
        """
        if not self.templated:
            return () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWERED}]
        try:
            text = encoding.chat_of(self.tokenizer).render(turns)
        except RowError:
            return ()
        return self._encode(text.rpartition(_ANSWERED)[2])

    def follow(
        self,
        problem: bundles.EnvironmentProblem,
        ids: tuple[int, ...],
        before: Messages,
        reply: str,
        answer: Sequence[Mapping[str, Any]],
    ) -> Continued:
        """The tokens up to the model's next reply.

        `ids`: the tokens so far, which end with a reply; `before`: the messages before that reply; `answer`: the
        environment's messages after it. Raises `RowError` if the template refuses them.
        """
        if not self.templated:
            text = "\n".join(str(message["content"]) for message in answer)
            return Continued(
                ids=ids + tuple(encoding.encode_text(self.tokenizer, text, add_special_tokens=False)), extends=True
            )
        start = self._render(before, problem.tools) + str(self._guarded(reply))
        whole = self._render([*before, {"role": "assistant", "content": reply}, *answer], problem.tools)
        if whole.startswith(start):
            added = self._encode(whole[len(start) :])
            if ids[-1] not in self.stop_ids:
                return Continued(ids=ids + added, extends=True)
            if added and added[0] == ids[-1]:
                return Continued(ids=ids + added[1:], extends=True)
        return Continued(ids=self._encode(whole), extends=False)

    def _guarded(self, value: Any) -> Any:
        return encoding.chat_of(self.tokenizer).encoder.guarded(value)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        chat = encoding.chat_of(self.tokenizer, tools or None)
        return chat.render(self._guarded(list(messages)), tools or None, add_generation_prompt=True)

    def _encode(self, text: str) -> tuple[int, ...]:
        encoder = encoding.chat_of(self.tokenizer).encoder
        if encoder.backend is not None:
            return tuple(encoder.encode_guarded(text)[0])
        return tuple(encoding.encode_text(self.tokenizer, text.replace(encoding.GUARD, ""), add_special_tokens=False))
