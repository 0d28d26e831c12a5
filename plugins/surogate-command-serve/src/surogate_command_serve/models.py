"""The models of a server by name, and requests to them as tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from surogate_command_serve.answers import Token, Usage
from surogate_command_serve.asks import Ask, RequestError
from surogate_command_serve.worker import Ticket
from surogate_core.plugin import UserError, bundles, encoding, inference
from surogate_core.service.inference import (
    CallReader,
    OneCall,
    core_parsers,
    grammars_of,
    parser_of,
    prompt_of_messages,
    prompt_of_text,
    tag_ids,
    token_bytes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USUAL_TOKENS = 16
"""Tokens of a completion, unless the request says otherwise, as the OpenAI API has it. A chat may fill the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that can be asked for."""

    name: str
    prepared: inference.PreparedModel
    sampling: bundles.Sampling
    """Unless the request says otherwise."""
    context: int
    """Tokens of the longest sequence."""
    parent: str | None = None
    """The base, if this is an adapter on it."""
    parsers: Mapping[str, bundles.ToolParserSpec] = field(default_factory=dict)
    """The tool parsers by name."""
    tool_parser: str = ""
    """The name of the one to use; by default the chat template decides."""
    constrains: bool = True
    """Whether the rollout engine takes grammars."""

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
        grammar = self._grammar(ask)
        requests = [
            bundles.Request(
                prompt=prompt.ids,
                max_new_tokens=self._room(prompt, ask),
                number=number,
                sample=sample,
                sampling=sampling,
                stop_ids=stop_ids,
                grammar=grammar,
            )
            for number, prompt in enumerate(prompts)
            for sample in range(ask.n)
        ]
        watches = [self._ending(ask, request) for request in requests]
        return Ticket(model=self.name, requests=requests, watches=watches)

    def watch(self, ask: Ask, request: bundles.Request) -> inference.GrowingText:
        """The text of a completion of a request while it grows."""
        return inference.GrowingText(
            self.tokenizer, request.prompt, ask.stop, shown=self._shown(ask) if ask.offer.tools else frozenset()
        )

    def _ending(self, ask: Ask, request: bundles.Request) -> inference.GrowingText:
        """Says when a completion ends: at a stop text, or behind the only call that it may have."""
        reader = None if ask.offer.several else self.reader(ask)
        if reader is None:
            return self.watch(ask, request)
        return OneCall(self.tokenizer, request.prompt, ask.stop, shown=self._shown(ask), reader=reader)

    def reader(self, ask: Ask) -> CallReader | None:
        """What finds the tool calls in a completion; None without tools."""
        if not ask.offer.tools:
            return None
        offered = ask.offer
        return CallReader(self._parser(ask), offered.functions, held=bool(offered.must), several=offered.several)

    def _shown(self, ask: Ask) -> frozenset[int]:
        """Special tokens that are part of the text, because calls are written with them."""
        return tag_ids(self.tokenizer, self._parser(ask).tags)

    def _parser(self, ask: Ask) -> bundles.ToolParserSpec:
        """The parser of the model's calls; raises `RequestError` without one."""
        try:
            template = encoding.chat_of(self.tokenizer, ask.offer.tools).template
            parser = parser_of(self.parsers or core_parsers(), template, name=self.tool_parser)
        except UserError as error:
            raise RequestError(f"tools: {error}", param="tools") from error
        if parser is None:
            raise RequestError(
                "tools: the chat template of the model writes no calls that a tool parser reads. Fix: leave tools "
                "out, or start the server with --tool-parser NAME",
                param="tools",
                code="unsupported_parameter",
            )
        return parser

    def _grammar(self, ask: Ask) -> bundles.Grammar | None:
        """What a constrained answer may be; raises `RequestError` for one that cannot be compiled."""
        if not ask.held:
            return None
        param = "response_format" if ask.schema is not None else "tool_choice"
        if not self.constrains:
            raise RequestError(
                f"{param}: the rollout engine of this server constrains no answers. Fix: leave it out, or start the "
                f"server with --engine native",
                param=param,
                code="unsupported_parameter",
            )
        try:
            size = self.prepared.model.vocab_size
            made = grammars_of(self.tokenizer, self.prepared.stop_ids, size)
            if ask.schema is not None:
                return made.of_schema(ask.schema)
            must = ask.offer.must
            schemas = [function.get("parameters") or {} for function in must]
            return made.of_rules(self._parser(ask).grammar(must, ask.offer.several, made.tag), schemas)
        except UserError as error:
            raise ask.unheld(str(error)) from error

    def echo(self, ask: Ask, request: bundles.Request) -> str:
        """The prompt of a completion as text."""
        prompt = ask.prompts[request.number]
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(list(prompt)))

    def token(self, token: int, logprob: float, offset: int) -> Token:
        """A token as it is shown with its log-probability; `offset`: where it begins in the text."""
        text, data = token_bytes(self.tokenizer).shown(token)
        return Token(text=text, data=data, logprob=logprob, offset=offset)

    def _prompts(self, ask: Ask) -> list[inference.Prompt]:
        try:
            if ask.chat:
                messages = prompt_of_messages(self.tokenizer, ask.messages, name="messages", tools=ask.offer.tools)
                return [messages]
            return [self._prompt(one) for one in ask.prompts]
        except UserError as error:
            raise RequestError(str(error), param="messages" if ask.chat else "prompt") from error

    def _prompt(self, one: str | tuple[int, ...]) -> inference.Prompt:
        if isinstance(one, str):
            return prompt_of_text(self.tokenizer, one, name="prompt")
        size = self.prepared.model.vocab_size
        if wrong := [token for token in one if not 0 <= token < size]:
            raise RequestError(f"prompt: {wrong[0]} is not a token; they are 0 to {size - 1}.", param="prompt")
        return inference.Prompt(name="prompt", ids=one)

    def _room(self, prompt: inference.Prompt, ask: Ask) -> int:
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

    def _sampling(self, ask: Ask) -> bundles.Sampling:
        """How tokens are chosen. Without a seed of its own a request gets a new one."""
        given: dict[str, Any] = {"seed": self.sampling.seed or secrets.randbits(63), **ask.sampling}
        asks = ask.n > 1 or given.keys() & {"top_k", "top_p", "min_p"}
        if self.sampling.temperature == 0 and asks and "temperature" not in given:
            given["temperature"] = 1.0
        return replace(self.sampling, **given)


def find(models: Mapping[str, ServedModel], name: str | None) -> ServedModel:
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


def usage_of(requests: Sequence[bundles.Request], completion: int) -> Usage:
    """The numbers of tokens; the prompt of several completions counts once."""
    return Usage(prompt=sum(len(r.prompt) for r in requests if r.sample == 0), completion=completion)
