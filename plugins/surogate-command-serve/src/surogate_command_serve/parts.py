"""The completions of a request as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from surogate_command_serve.answers import Choice, Token
from surogate_command_serve.asks import Ask
from surogate_command_serve.models import ServedModel
from surogate_command_serve.worker import Chosen, Ticket
from surogate_core.service.inference import Delta


class TicketParts:
    """The completions of a ticket as they grow, for the thread that answers."""

    def __init__(self, ask: Ask, model: ServedModel, ticket: Ticket):
        self._ask, self._model, self._ticket = ask, model, ticket
        self._texts = [model.watch(ask, request) for request in ticket.requests]
        self._readers = [model.reader(ask) for _ in ticket.requests]
        """Find the tool calls of each; None without tools."""
        self._reasons: list[Any] = [None] * len(ticket.requests)
        self._logprobs: list[list[Token]] = [[] for _ in ticket.requests]
        self._given = [0] * len(ticket.requests)
        """Tokens with log-probabilities that `new` has given."""
        self._touched: dict[int, None] = {}
        self._echoed: set[int] = set()
        self.tokens = 0
        self.open = len(ticket.requests)

    def take(self, chosen: Chosen) -> None:
        """One more token."""
        place = chosen.place
        ends = chosen.token in self._ticket.requests[place].stop_ids
        if self._ask.logprobs and not ends:
            offset = self._texts[place].place()
            self._logprobs[place].append(self._model.token(chosen.token, chosen.logprob, offset))
        self._texts[place].take(chosen.token)
        self._touched[place] = None
        self.tokens += 1
        if chosen.reason is not None:
            grammar = self._ticket.requests[place].grammar
            if grammar is not None and grammar.failure is not None:
                raise self._ask.unheld(grammar.failure)
            self._reasons[place] = chosen.reason
            self.open -= 1

    def whole(self) -> list[Choice]:
        """All completions."""
        return [self._whole(place) for place in range(len(self._texts))]

    def _whole(self, place: int) -> Choice:
        text, reader = self._texts[place].text(), self._readers[place]
        if reader is not None:
            reader.feed(text)
            reader.close()
            text = reader.content
        return Choice(
            index=place,
            text=self._echo(place) + text,
            tokens=self._tokens(place, ended=True),
            calls=() if reader is None else reader.calls,
            reason=self._reason(place),
        )

    def _reason(self, place: int) -> Any:
        """Why a completion ended, as the API says it."""
        reason, reader = self._reasons[place], self._readers[place]
        called = reader is not None and reader.calls and not reader.cut
        return "tool_calls" if reason == "stop" and called else reason

    def new(self) -> Iterator[Choice]:
        """The new parts of completions since the last call."""
        touched, self._touched = self._touched, {}
        for place in touched:
            reason = self._reasons[place]
            text = self._echo(place) + self._texts[place].settled(reason is not None)
            tokens = self._tokens(place, ended=reason is not None)
            deltas: list[Delta] = []
            if (reader := self._readers[place]) is not None:
                deltas = reader.feed(text) + (reader.close() if reason is not None else [])
                text = "".join(delta.content for delta in deltas)
                deltas = [delta for delta in deltas if delta.number is not None]
            if text or tokens or deltas or reason:
                yield Choice(index=place, text=text, tokens=tokens, deltas=deltas, reason=self._reason(place))

    def _tokens(self, place: int, *, ended: bool) -> list[Token] | None:
        """The tokens that are new, of a text that has not ended those that begin in what is settled of it."""
        if not self._ask.logprobs:
            return None
        watch, found = self._texts[place], self._logprobs[place]
        end = watch.place()
        first = last = self._given[place]
        while last < len(found) and (ended or found[last].offset < watch.given):
            last += 1
        self._given[place] = last
        return [replace(token, offset=min(token.offset, end)) for token in found[first:last]]

    def _echo(self, place: int) -> str:
        """The prompt before a completion, once, if the request asks for it."""
        if not self._ask.echo or place in self._echoed:
            return ""
        self._echoed.add(place)
        return self._model.echo(self._ask, self._ticket.requests[place])
