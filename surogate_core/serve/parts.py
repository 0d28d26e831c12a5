"""The completions of a request as they grow."""

from __future__ import annotations

from collections.abc import Iterator
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
        self._offsets = [0] * len(ticket.requests)
        self._touched: dict[int, None] = {}
        self._echoed: set[int] = set()
        self.tokens = 0
        self.open = len(ticket.requests)

    def take(self, chosen: Chosen) -> None:
        """One more token."""
        place = chosen.place
        self._texts[place].take(chosen.token)
        self._touched[place] = None
        self.tokens += 1
        ends = chosen.token in self._ticket.requests[place].stop_ids
        if self._ask.logprobs and not ends:
            self._logprobs[place].append(self._model.token(chosen.token, chosen.logprob))
        if chosen.reason is not None:
            self._reasons[place] = chosen.reason
            self.open -= 1

    def whole(self) -> list[Choice]:
        """All completions."""
        return [
            Choice(
                index=place,
                text=self._echo(place) + watch.text(),
                tokens=self._logprobs[place] if self._ask.logprobs else None,
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
            tokens = self._logprobs[place][self._given[place] :] if self._ask.logprobs else None
            if not (text or tokens or reason):
                continue
            offset = self._offsets[place]
            if tokens is not None:
                self._given[place] += len(tokens)
                self._offsets[place] += sum(len(token.text) for token in tokens)
            yield Choice(index=place, text=text, tokens=tokens, offset=offset, reason=reason)

    def _echo(self, place: int) -> str:
        """The prompt before a completion, once, if the request asks for it."""
        if not self._ask.echo or place in self._echoed:
            return ""
        self._echoed.add(place)
        return self._model.echo(self._ask, self._ticket.requests[place])
