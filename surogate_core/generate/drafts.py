"""Drafts: tokens that a text probably goes on with, which a step checks in rows that would be empty.

A step has as many rows for one sequence as for sixteen, and as many for some more as for all slots. A sequence whose
text repeats itself, or another sample of its prompt, gets further rows: behind the row of its last token those of the
tokens that followed the same n-gram before (prompt lookup decoding, Saxena 2023). Each row chooses its next token with
the noise of its own place. If a draft equals the choice of the row before it, its row is the one that the next step
would have had, with the same bits. What the rows of rejected drafts write into a slot is behind the text, where later
rows overwrite it before any row sees it.

Which sequences get drafts follows from tokens alone, so equal calls take equal steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surogate_core.dsl.mixers import Spec, States

if TYPE_CHECKING:
    from surogate_core.bundles import Sampling
    from surogate_core.engine.planning.assembly import Assembly
    from surogate_core.generate.sequences import Chosen, Running

ROWS = 16
"""Rows of a step for few sequences, and the most of one: a ring has room for a segment beside its window."""
LENGTHS = (4, 3, 2)
"""Tokens of the n-grams by which a text finds itself, the longest first."""
MEMORY = 8
"""About as many last tokens say how well drafts guess."""


Gram = tuple[int, ...]
Place = tuple[list[int], int]
"""A text, and a number of first tokens of it."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Siblings:
    """The texts of one prompt, while one of them runs."""

    ended: list[list[int]] = field(default_factory=list)
    """Completions that have ended, until one that runs wants drafts."""
    behind: dict[Gram, Place] = field(default_factory=dict)
    """n-gram of completions → the place behind its latest occurrence."""

    def read(self) -> None:
        """Learn the n-grams of completions that have ended."""
        for ids in self.ended:
            Repeats(siblings=self).follow(ids, chosen=True)
        self.ended.clear()


@dataclass(slots=True)
class Repeats:
    """A text, and where its n-grams were before, in it or in its siblings."""

    text: list[int] = field(default_factory=list)
    rate: float = 0.0
    """The share of the last chosen tokens that a draft would have guessed."""
    siblings: Siblings = field(default_factory=Siblings)
    _behind: dict[Gram, Place] = field(default_factory=dict)
    """n-gram → the place behind its latest occurrence."""
    _source: Place | None = None
    """The place of the token that followed when a text ended as this one does now."""

    def follow(self, tokens: Iterable[int], *, chosen: bool) -> None:
        """Append tokens. `chosen`: whether the model chose them, so that they say how well drafts guess, and siblings
        may go on like them.
        """
        text, own, others = self.text, self._behind, self.siblings.behind
        grams = self._grams()
        for token in tokens:
            if chosen:
                self.rate += (self._guesses(token) - self.rate) / MEMORY
            # Only now, when it goes on, so that what is found has something behind it.
            place = text, len(text)
            for gram in grams:
                own[gram] = place
                if chosen:
                    others[gram] = place
            text.append(token)
            grams, source = self._grams(), None
            for gram in grams:
                source = source or own.get(gram) or others.get(gram)
            self._source = source

    def _grams(self) -> list[Gram]:
        return [tuple(self.text[-length:]) for length in LENGTHS if length <= len(self.text)]

    def _guesses(self, token: int) -> bool:
        if self._source is None:
            return False
        text, place = self._source
        return text[place] == token

    def next(self, count: int) -> list[int]:
        """As many tokens that followed before, or those that there are. A text that goes in a circle goes on in it."""
        if self._source is None:
            return []
        text, first = self._source
        drafts = text[first : first + count]
        if text is self.text:
            circle = len(text) - first
            drafts += [drafts[place % circle] for place in range(circle, count)]
        return drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """A row of a step: the last token of a sequence, or a draft."""

    sequence: Running
    token: int
    ahead: int = 0
    """How many tokens of the step are before it in its sequence."""

    @property
    def sampling(self) -> Sampling:
        """How its token is chosen."""
        return self.sequence.request.sampling

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
    rows: Callable[[int], int]
    """Number of running sequences → rows of their step."""
    pays: Callable[[int], float]
    """Rows of a step → its drafts that must be right, for each running sequence, to be worth what they cost."""
    steps: int = 0
    """Steps with drafts so far."""
    right: int = 0
    """Drafts of them that were accepted."""

    def of(self, running: Sequence[Running]) -> list[list[int]]:
        """The drafts of each sequence; empty if there are none, or so few are probably right that they cost time."""
        texts, free = self._texts(running), self._free(running)
        most = min(free, ROWS - 1)
        longest = [text.next(min(most, s.remaining - 1)) for text, s in zip(texts, running, strict=False)]
        counts, worth = shared_out(free, [text.rate for text in texts], [len(tokens) for tokens in longest])
        drafts = [tokens[:count] for tokens, count in zip(longest, counts, strict=True)]
        return drafts if any(drafts) and worth >= self._least(running) else []

    def likely(self, running: Sequence[Running]) -> bool:
        """Whether drafts probably pay in the next steps, judged by the tokens so far."""
        texts, free = self._texts(running), self._free(running)
        _, worth = shared_out(free, [text.rate for text in texts], [min(free, ROWS - 1)] * len(texts))
        return bool(texts) and worth >= self._least(running)

    def checked(self, rows: Sequence[StepRow], pairs: Sequence[tuple[int, float]]) -> dict[int, Chosen]:
        """See `accepted`."""
        found = accepted(rows, pairs)
        self.steps += len(rows) > len(found)
        self.right += sum(len(chosen) - 1 for chosen in found.values())
        return found

    def _free(self, running: Sequence[Running]) -> int:
        return self.rows(len(running)) - len(running)

    def _least(self, running: Sequence[Running]) -> float:
        """Right drafts that make a step with drafts as fast as one without."""
        return self.pays(self.rows(len(running))) * len(running)

    def _texts(self, running: Sequence[Running]) -> list[Repeats]:
        """The text of each sequence; empty if none gets drafts.

        A penalty and a grammar apply to a row by the tokens before it, which are not chosen yet.
        """
        if not self.allowed or self._free(running) < max(1.0, self._least(running)):
            return []
        if any(s.constraint is not None or s.request.sampling.repetition_penalty != 1 for s in running):
            return []
        for sequence in running:
            if sequence.repeats is None:
                sequence.repeats = Repeats(siblings=sequence.siblings)
                sequence.repeats.follow(sequence.request.prompt, chosen=False)
            sequence.siblings.read()
            known = len(sequence.repeats.text) - len(sequence.request.prompt)
            sequence.repeats.follow(sequence.ids[known:], chosen=True)
        return [sequence.repeats for sequence in running if sequence.repeats is not None]


def shared_out(free: int, rates: Sequence[float], most: Sequence[int]) -> tuple[list[int], float]:
    """(how many drafts each text gets, how many of them are probably right). Each further row goes where it is right
    with the highest probability, if every draft of a text is right with its rate; of equal ones where there are fewest.

    `most`: of each text.
    """
    counts, worth = [0] * len(rates), 0.0
    waiting = [(-rate, 1, number) for number, rate in enumerate(rates) if most[number] > 0]
    heapq.heapify(waiting)
    while free > 0 and waiting:
        chance, count, number = heapq.heappop(waiting)
        counts[number], worth, free = count, worth - chance, free - 1
        if count < most[number]:
            heapq.heappush(waiting, (chance * rates[number], count + 1, number))
    return counts, worth
