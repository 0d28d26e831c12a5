"""Generated word problems with answers that are worked out step by step.

A problem is a story about one quantity: it begins with a number, one to four operations change it, and the question
asks for the result. Pre-training and fine-tuning have wordings of their own. A held-out problem shares its operations
and numbers with no trained one, so none is a trained problem in other words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from parity_text import NAMES, PLACES, THINGS

Use = Literal["pretrain", "finetune"]
ANSWER = "#### "
"""Before the final number, as in GSM8K."""
LARGEST = (10, 20, 50, 100, 500)
"""Largest number of a problem; each is equally frequent."""
STEPS = (1, 2, 3, 4)
"""Operations of a problem; each count is equally frequent."""
TOP = 10_000
"""Largest value within a story."""

STARTS: dict[Use, Sequence[str]] = {
    "pretrain": ("{who} has {n} {things}.", "There are {n} {things} in {who}'s {place}."),
    "finetune": ("{who} starts the week with {n} {things}.", "{who} counts {n} {things} in a {place}."),
}
WORDINGS: dict[str, dict[Use, Sequence[str]]] = {
    "gain": {
        "pretrain": ("{who} finds {n} more {things}.", "{other} gives {n} {things} to {who}."),
        "finetune": ("Then {who} buys another {n}.", "Later {other} drops off {n} {things} for {who}."),
    },
    "lose": {
        "pretrain": ("{who} gives away {n} {things}.", "{who} loses {n} of them."),
        "finetune": ("{other} borrows {n} of the {things}.", "Unfortunately {n} {things} turn out to be broken."),
    },
    "packs": {
        "pretrain": ("{other} brings {k} {place}s with {n} {things} each.",),
        "finetune": ("{who} then orders {k} {place}s, and every {place} holds {n} {things}.",),
    },
    "times": {
        "pretrain": ("Now {who} gets {k} times as many {things}.",),
        "finetune": ("After a month {who}'s collection is {k} times as large.",),
    },
    "share": {
        "pretrain": ("{who} divides the {things} equally among {k} people and keeps one part.",),
        "finetune": ("{who} splits all of them evenly into {k} piles and takes just one pile home.",),
    },
}
QUESTIONS: dict[Use, Sequence[str]] = {
    "pretrain": ("How many {things} does {who} have now?",),
    "finetune": ("How many {things} are left for {who}?", "What is the number of {things} that {who} has in the end?"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A word problem, its worked answer, and the numbers that it is made of."""

    question: str
    worked: str
    """The steps, and after `ANSWER` the result."""
    answer: int
    steps: int
    largest: int
    """One of `LARGEST`."""
    key: bytes
    """A digest of the operations and their numbers, whatever the wording."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One operation: its numbers, the value after it, and how it is worked out."""

    kind: str
    n: int
    k: int
    value: int
    worked: str


def _change(kind: str, value: int, largest: int, random: np.random.Generator) -> _Change | None:
    """The operation on a value; None if it does not apply."""
    n, k = int(random.integers(2, largest + 1)), int(random.integers(2, 10))
    match kind:
        case "gain":
            return _Change(kind, n, 0, value + n, f"{value} + {n} = {value + n}.")
        case "lose" if value > 2:
            n = int(random.integers(1, min(value - 1, largest) + 1))
            return _Change(kind, n, 0, value - n, f"{value} - {n} = {value - n}.")
        case "packs":
            worked = f"{k} * {n} = {k * n}. {value} + {k * n} = {value + k * n}."
            return _Change(kind, n, k, value + k * n, worked)
        case "times" if value * k <= TOP:
            return _Change(kind, 0, k, value * k, f"{value} * {k} = {value * k}.")
        case "share":
            divisors = [d for d in range(2, 10) if value % d == 0 and value > d]
            if divisors:
                k = divisors[int(random.integers(len(divisors)))]
                return _Change(kind, 0, k, value // k, f"{value} / {k} = {value // k}.")
    return None


def _pick(texts: Sequence[str], random: np.random.Generator) -> str:
    return texts[int(random.integers(len(texts)))]


def problem(random: np.random.Generator, use: Use) -> Problem:
    """One problem with one to four operations."""
    largest, steps = (int(random.choice(of)) for of in (LARGEST, STEPS))
    who, other = (str(name) for name in random.choice(NAMES, 2, replace=False))
    words = {"who": who, "other": other, "things": str(random.choice(THINGS)), "place": str(random.choice(PLACES))}
    value = int(random.integers(2, largest + 1))
    told = [_pick(STARTS[use], random).format(n=value, **words)]
    numbers: list[str | int] = [value]
    worked: list[str] = []
    while len(worked) < steps:
        kind = str(random.choice(tuple(WORDINGS)))
        change = _change(kind, value, largest, random)
        if change is None or change.value > TOP:
            continue
        told.append(_pick(WORDINGS[kind][use], random).format(n=change.n, k=change.k, **words))
        numbers += [kind, change.n, change.k]
        worked.append(change.worked)
        value = change.value
    told.append(_pick(QUESTIONS[use], random).format(**words))
    return Problem(
        question=" ".join(told),
        worked=" ".join([*worked, f"{ANSWER}{value}"]),
        answer=value,
        steps=steps,
        largest=largest,
        key=hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(),
    )


def distinct(use: Use, *, seed: int, seen: set[bytes]) -> Iterator[Problem]:
    """Problems without end, none with the operations and numbers of another one or of `seen`.

    Their digests are added to `seen`.
    """
    for made in problems(use, seed=seed, avoid=seen):
        seen.add(made.key)
        yield made


def problems(use: Use, *, seed: int, avoid: Collection[bytes] = ()) -> Iterator[Problem]:
    """Problems without end, none with the operations and numbers of one in `avoid`."""
    random = np.random.default_rng(seed)
    while True:
        made = problem(random, use)
        if made.key not in avoid:
            yield made


def final_number(text: str) -> str | None:
    """The number after the last `ANSWER`, without commas, signs of money and a final point; None without one."""
    _, found, rest = text.rpartition(ANSWER.strip())
    words = rest.split() if found else []
    return words[0].replace(",", "").replace("$", "").rstrip(".") if words else None
