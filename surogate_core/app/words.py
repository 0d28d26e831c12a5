"""The words after a command that takes models, keys of a run, and flags of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from surogate_core.app.sampling import NUMBERS, number
from surogate_core.errors import UserError


@dataclass(slots=True)
class Words:
    """Sorted words; flags keep their dashes."""

    models: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    sampling: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of a command, by kind."""

    command: str
    """Such as ``surogate eval``, for messages."""
    texts: tuple[str, ...] = ()
    """One value each; the last one counts."""
    lists: tuple[str, ...] = ()
    """They may be repeated."""
    counts: tuple[str, ...] = ()
    """Whole numbers from 1."""
    switches: tuple[str, ...] = ()
    """They take no value."""
    samples: bool = False
    """Whether the command has the flags of sampling (`NUMBERS`)."""

    def read(self, argv: Sequence[str]) -> Words:
        """Sort the words after the command; raises `UserError`."""
        found, words = Words(), list(argv)
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            if word.startswith("-"):
                self._check(flag, equals)
                if flag in self.switches:
                    found.switches.add(flag)
                    continue
                if not equals and not words:
                    raise UserError(f"{self.command} {flag}: a value must follow. Fix: `{self.command} --help`")
                self._take(found, flag, value if equals else words.pop(0))
            elif equals or word.startswith(("+", "~")):
                found.overrides.append(word)
            elif word in found.models:
                raise UserError(f"{self.command}: {word} is named twice. Fix: name it once.")
            else:
                found.models.append(word)
        return found

    def _check(self, flag: str, equals: str) -> None:
        known = (*(NUMBERS if self.samples else ()), *self.counts, *self.texts, *self.lists, *self.switches)
        if flag not in known:
            near = get_close_matches(flag, known, n=1)
            fix = near[0] if near else f"`{self.command} --help` shows the form"
            raise UserError(f"{self.command}: {flag} is not known. Fix: {fix}")
        if flag in self.switches and equals:
            raise UserError(f"{flag}: is a switch and takes no value. Fix: {flag}, or leave it out.")

    def _take(self, found: Words, flag: str, value: str) -> None:
        if flag in self.lists:
            found.lists.setdefault(flag, []).append(value)
        elif flag in self.texts:
            found.texts[flag] = value
        elif flag in self.counts:
            found.counts[flag] = int(number(flag, value, int, least=1))
        else:
            found.sampling[flag] = number(flag, value, NUMBERS[flag])
