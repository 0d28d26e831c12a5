"""The models of a server by name, and requests to them as tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surogate_core.bundles import Request, Sampling
from surogate_core.errors import UserError
from surogate_core.run.completions import Watch, token_bytes
from surogate_core.run.generation import Prepared
from surogate_core.run.texts import Prompt, prompt_of_messages, prompt_of_text
from surogate_core.serve.answers import Token, Usage
from surogate_core.serve.asks import Ask, RequestError
from surogate_core.serve.worker import Ticket

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL_TOKENS = 16
"""Tokens of a completion, unless the request says otherwise, as the OpenAI API has it. A chat may fill the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model that can be asked for."""

    name: str
    prepared: Prepared
    sampling: Sampling
    """Unless the request says otherwise."""
    context: int
    """Tokens of the longest sequence."""
    parent: str | None = None
    """The base, if this is an adapter on it."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""
        return self.prepared.tokenizer

    def entry(self, created: int) -> dict[str, Any]:
        """Its entry in the list of models."""
        own = {"id": self.name, "object": "model", "created": created, "owned_by": "surogate"}
        return own | {"max_model_len": self.context} | ({"parent": self.parent} if self.parent else {})

    def ticket(self, ask: Ask) -> Ticket:
        """The completions of a request; raises `RequestError`."""
        prompts = self._prompts(ask)
        sampling = self._sampling(ask)
        stop_ids = frozenset() if ask.ignore_eos else self.prepared.stop_ids
        requests = [
            Request(
                prompt=prompt.ids,
                max_new_tokens=self._room(prompt, ask),
                number=number,
                sample=sample,
                sampling=sampling,
                stop_ids=stop_ids,
            )
            for number, prompt in enumerate(prompts)
            for sample in range(ask.n)
        ]
        watches = [self.watch(ask, request) for request in requests]
        return Ticket(model=self.name, requests=requests, watches=watches)

    def watch(self, ask: Ask, request: Request) -> Watch:
        """The text of a completion of a request while it grows."""
        return Watch(self.tokenizer, request.prompt, ask.stop)

    def echo(self, ask: Ask, request: Request) -> str:
        """The prompt of a completion as text."""
        prompt = ask.prompts[request.number]
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(list(prompt)))

    def token(self, token: int, logprob: float, offset: int) -> Token:
        """A token as it is shown with its log-probability; `offset`: where it begins in the text."""
        text, data = token_bytes(self.tokenizer).shown(token)
        return Token(text=text, data=data, logprob=logprob, offset=offset)

    def _prompts(self, ask: Ask) -> list[Prompt]:
        try:
            if ask.chat:
                return [prompt_of_messages(self.tokenizer, ask.messages, name="messages")]
            return [self._prompt(one) for one in ask.prompts]
        except UserError as error:
            raise RequestError(str(error), param="messages" if ask.chat else "prompt") from error

    def _prompt(self, one: str | tuple[int, ...]) -> Prompt:
        if isinstance(one, str):
            return prompt_of_text(self.tokenizer, one, name="prompt")
        size = self.prepared.model.vocab_size
        if wrong := [token for token in one if not 0 <= token < size]:
            raise RequestError(f"prompt: {wrong[0]} is not a token; they are 0 to {size - 1}.", param="prompt")
        return Prompt(name="prompt", ids=one)

    def _room(self, prompt: Prompt, ask: Ask) -> int:
        """The largest number of new tokens."""
        room = self.context - len(prompt.ids)
        if room < 1:
            more = ", or start the server with a larger --context" if self.context < self.prepared.context else ""
            raise RequestError(
                f"{prompt.name}: has {len(prompt.ids):,} tokens, and there is room for {self.context:,} with the "
                f"completion. Fix: shorten it{more}.",
                param=prompt.name,
                code="context_length_exceeded",
            )
        return min(room, ask.max_tokens or (room if ask.chat else USUAL_TOKENS))

    def _sampling(self, ask: Ask) -> Sampling:
        """How tokens are chosen. Without a seed of its own a request gets a new one."""
        given: dict[str, Any] = {"seed": self.sampling.seed or secrets.randbits(63), **ask.sampling}
        asks = ask.n > 1 or given.keys() & {"top_k", "top_p", "min_p"}
        if self.sampling.temperature == 0 and asks and "temperature" not in given:
            given["temperature"] = 1.0
        return replace(self.sampling, **given)


def find(models: Mapping[str, Served], name: str | None) -> Served:
    """The model of a name; without one the only model. Raises `RequestError`."""
    known = ", ".join(models)
    if name is None:
        if len(models) == 1:
            return next(iter(models.values()))
        raise RequestError(f"model: is missing. Fix: one of {known}", param="model")
    if name not in models:
        raise RequestError(
            f"model {name[:200]}: there is no such model. Fix: {known}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return models[name]


def usage_of(requests: Sequence[Request], completion: int) -> Usage:
    """The numbers of tokens; the prompt of several completions counts once."""
    return Usage(prompt=sum(len(r.prompt) for r in requests if r.sample == 0), completion=completion)
