"""What an engine runs: requests in their slots, and prompts to write into slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from surogate_core.bundles import Constraint, Request
from surogate_core.generate.drafts import Repeats, Siblings

SEGMENT = 16
"""Tokens of a segment of a prompt. Segments are counted from the beginning of the prompt."""


@dataclass(slots=True, eq=False)
class Running:
    """A request in its slot."""

    index: int
    request: Request
    slot: int
    key: tuple[int, int]
    hidden_D: Tensor = field(default_factory=lambda: torch.empty(0))
    """The last layer's output for the token with which a prefill ended."""
    filled: bool = True
    """Whether that is its last token."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    constraint: Constraint | None = None
    """What the request's grammar allows after these tokens."""
    repeats: Repeats | None = None
    """Its text, once it may get drafts."""
    siblings: Siblings = field(default_factory=Siblings)
    """The other texts of its prompt."""

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and the tokens so far."""
        return (*self.request.prompt, *self.ids)

    @property
    def length(self) -> int:
        """Tokens so far, the prompt included."""
        return len(self.request.prompt) + len(self.ids)

    @property
    def remaining(self) -> int:
        """Tokens that it may still get."""
        return self.request.max_new_tokens - len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """A prompt that waits to have its keys and values written into a slot, from a segment on."""

    slot: int
    ids: tuple[int, ...]
    start: int = 0

    def segments(self) -> range:
        """The first position of each segment."""
        return range(self.start, len(self.ids), SEGMENT)


Chosen = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities, in order."""


class Runner(Protocol):
    """Runs the layers of a model over its slots."""

    gather: int
    """Slots that must be free before some are filled, unless all waiting requests have one or none runs."""
    least_shared: int
    """First tokens of a prompt that are copied from another slot, if there are as many or more."""

    def prefill(self, fills: Sequence[Fill]) -> Iterable[Tensor]:
        """Write the keys and values of prompts; for each the last layer's output for its tokens from its start on, with
        any rows behind them.
        """

    def advance(self, running: Sequence[Running], *, queued: bool) -> Sequence[Chosen]:
        """The next tokens of each, at least one of them has some. The caller adds them to `ids`, up to an end, and
        clears `filled`. `queued`: whether requests wait for slots of these.
        """

    def logits(self, x_ND: Tensor) -> Tensor:
        """[N, V] of the last layer's output of any number of rows."""
