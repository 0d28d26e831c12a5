"""Drafts: tokens that a text probably goes on with, which a step checks in rows that would be empty.

A step has as many rows for one sequence as for sixteen. A sequence whose text repeats itself gets further rows: behind
the row of its last token those of the tokens that followed when its text had the same n-gram before (prompt lookup
decoding, Saxena 2023). Each row chooses its next token with the noise of its own place. If a draft equals the choice of
the row before it, its row is the one that the next step would have had, with the same bits. What the rows of rejected
drafts write into a slot is behind the text, where later rows overwrite it before any row sees it.

Which sequences get drafts follows from tokens alone, so equal calls take equal steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surogate_core.dsl.mixers import Spec, States

if TYPE_CHECKING:
    from surogate_core.engine.planning.assembly import Assembly
    from surogate_core.generate.sequences import Chosen, Running

ROWS = 16
"""Rows of a step for few sequences."""
LENGTHS = (4, 3, 2)
"""Tokens of the n-grams by which a text finds itself, the longest first."""
MEMORY = 8
"""About as many last tokens say how well drafts guess."""


@dataclass(slots=True)
class Repeats:
    """A text, and where its n-grams were before."""

    text: list[int] = field(default_factory=list)
    rate: float = 0.0
    """The share of the last chosen tokens that a draft would have guessed."""
    _behind: dict[tuple[int, ...], int] = field(default_factory=dict)
    """n-gram → the place behind its latest occurrence."""
    _source: int | None = None
    """The place of the token that followed when the text ended as it does now."""

    def follow(self, tokens: Iterable[int], *, chosen: bool) -> None:
        """Append tokens. `chosen`: whether the model chose them, so that they say how well drafts guess."""
        text, behind = self.text, self._behind
        for token in tokens:
            if chosen:
                hit = self._source is not None and text[self._source] == token
                self.rate += (hit - self.rate) / MEMORY
            text.append(token)
            source = None
            for length in LENGTHS:
                if length > len(text):
                    continue
                gram = tuple(text[-length:])
                found = behind.get(gram)
                source = found if source is None else source
                behind[gram] = len(text)
            self._source = source

    def next(self, count: int) -> list[int]:
        """As many tokens that followed before, or none. A text that goes in a circle goes on in it."""
        if self._source is None:
            return []
        drafts: list[int] = []
        for place in range(self._source, self._source + count):
            drafts.append(self.text[place] if place < len(self.text) else drafts[place - len(self.text)])
        return drafts

    def gain(self, count: int) -> float:
        """How many of `count` drafts are right, if each is with the same probability."""
        return sum(self.rate**number for number in range(1, count + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A row of a step: the last token of a sequence, or a draft."""

    sequence: Running
    token: int
    ahead: int = 0
    """How many tokens of the step are before it in its sequence."""

    @property
    def position(self) -> int:
        """The token's position in its slot."""
        return self.sequence.length - 1 + self.ahead

    @property
    def number(self) -> int:
        """The place in the completion of the token that the row chooses."""
        return len(self.sequence.ids) + self.ahead


def rows_of(running: Sequence[Running], drafts: Sequence[Sequence[int]] = ()) -> list[StepRow]:
    """The rows of a step; those of a sequence follow each other."""
    rows = []
    for sequence, tokens in zip(running, drafts or [()] * len(running), strict=True):
        together = enumerate(((sequence.ids or sequence.request.prompt)[-1], *tokens))
        rows += [StepRow(sequence=sequence, token=token, ahead=ahead) for ahead, token in together]
    return rows


def accepted(rows: Sequence[StepRow], pairs: Sequence[tuple[int, float]]) -> dict[int, Chosen]:
    """id of a sequence → what its rows chose, up to the first draft that differs from the choice before it."""
    found: dict[int, list[tuple[int, float]]] = {}
    agrees = False
    for number, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
        agrees = not row.ahead or (agrees and pairs[number - 1][0] == row.token)
        if agrees:
            found.setdefault(id(row.sequence), []).append(pair)
    return dict(found)


def separate(assembly: Assembly, mixers: Sequence[Sequence[Spec]]) -> bool:
    """Whether rows of one sequence have the bits in one step that they have in several.

    A recurrence moves a state on, and a recipe may scale all rows of a product together.
    """
    return assembly.recipe.plain and not any(isinstance(spec, States) for specs in mixers for spec in specs)


@dataclass(slots=True, kw_only=True)
class Drafts:
    """Chooses the drafts of an engine's steps."""

    allowed: bool
    pays: float
    """Right drafts of a step, for each running sequence, that are worth what a step with drafts costs more."""
    steps: int = 0
    """Steps with drafts so far."""
    right: int = 0
    """Drafts of them that were accepted."""

    def of(self, running: Sequence[Running]) -> list[list[int]]:
        """The drafts of each sequence; empty if there are none, or so few are probably right that they cost time."""
        texts, most = self._texts(running), self._most(running)
        drafts = [text.next(min(most, s.remaining - 1)) for text, s in zip(texts, running, strict=False)]
        worth = sum(text.gain(len(tokens)) for text, tokens in zip(texts, drafts, strict=True))
        return drafts if any(drafts) and worth >= self.pays * len(running) else []

    def likely(self, running: Sequence[Running]) -> bool:
        """Whether drafts probably pay in the next steps, judged by the tokens so far."""
        texts, most = self._texts(running), self._most(running)
        return bool(texts) and sum(text.gain(most) for text in texts) >= self.pays * len(running)

    def checked(self, rows: Sequence[StepRow], pairs: Sequence[tuple[int, float]]) -> dict[int, Chosen]:
        """See `accepted`."""
        found = accepted(rows, pairs)
        self.steps += len(rows) > len(found)
        self.right += sum(len(chosen) - 1 for chosen in found.values())
        return found

    def _most(self, running: Sequence[Running]) -> int:
        return ROWS // len(running) - 1

    def _texts(self, running: Sequence[Running]) -> list[Repeats]:
        """The text of each sequence; empty if none gets drafts.

        A penalty and a grammar apply to a row by the tokens before it, which are not chosen yet.
        """
        if not self.allowed or self._most(running) < 1:
            return []
        if any(s.constraint is not None or s.request.sampling.repetition_penalty != 1 for s in running):
            return []
        for sequence in running:
            if sequence.repeats is None:
                sequence.repeats = Repeats()
                sequence.repeats.follow(sequence.request.prompt, chosen=False)
            known = len(sequence.repeats.text) - len(sequence.request.prompt)
            sequence.repeats.follow(sequence.ids[known:], chosen=True)
        return [sequence.repeats for sequence in running if sequence.repeats is not None]
