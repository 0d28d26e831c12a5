"""The completions of a request as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from surogate_core.serve.answers import Choice, Token
from surogate_core.serve.asks import Ask
from surogate_core.serve.models import Served
from surogate_core.serve.worker import Chosen, Ticket


class Parts:
    """The completions of a ticket as they grow, for the thread that answers."""

    def __init__(self, ask: Ask, model: Served, ticket: Ticket):
        self._ask, self._model, self._ticket = ask, model, ticket
        self._texts = [model.watch(ask, request) for request in ticket.requests]
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
            self._reasons[place] = chosen.reason
            self.open -= 1

    def whole(self) -> list[Choice]:
        """All completions."""
        return [
            Choice(
                index=place,
                text=self._echo(place) + watch.text(),
                tokens=self._tokens(place, ended=True),
                reason=self._reasons[place],
            )
            for place, watch in enumerate(self._texts)
        ]

    def new(self) -> Iterator[Choice]:
        """The new parts of completions since the last call."""
        touched, self._touched = self._touched, {}
        for place in touched:
            reason = self._reasons[place]
            text = self._echo(place) + self._texts[place].settled(reason is not None)
            tokens = self._tokens(place, ended=reason is not None)
            if text or tokens or reason:
                yield Choice(index=place, text=text, tokens=tokens, reason=reason)

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
