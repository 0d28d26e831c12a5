"""The words after a command that takes models, keys of a run, and flags of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from surogate_commands.flags import Flag
from surogate_commands.sampling import NUMBERS, number
from surogate_core.plugin import UserError


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
    """The flags of a command."""

    command: str
    """Such as ``surogate eval``, for messages."""
    flags: tuple[Flag, ...] = ()

    def read(self, argv: Sequence[str]) -> Words:
        """Sort the words after the command; raises `UserError`."""
        kinds = {name: flag.kind for flag in self.flags for name in flag.names}
        found, words = Words(), list(argv)
        while words:
            word = words.pop(0)
            flag, equals, value = word.partition("=")
            if word.startswith("-"):
                self._check(flag, equals, kinds)
                if kinds[flag] == "switch":
                    found.switches.add(flag)
                    continue
                if not equals and not words:
                    raise UserError(f"{self.command} {flag}: a value must follow. Fix: `{self.command} --help`")
                _take(found, kinds[flag], flag, value if equals else words.pop(0))
            elif equals or word.startswith(("+", "~")):
                found.overrides.append(word)
            elif word in found.models:
                raise UserError(f"{self.command}: {word} is named twice. Fix: name it once.")
            else:
                found.models.append(word)
        return found

    def _check(self, flag: str, equals: str, kinds: Mapping[str, str]) -> None:
        if flag not in kinds:
            near = get_close_matches(flag, kinds, n=1)
            fix = near[0] if near else f"`{self.command} --help` shows the form"
            raise UserError(f"{self.command}: {flag} is not known. Fix: {fix}")
        if kinds[flag] == "switch" and equals:
            raise UserError(f"{flag}: is a switch and takes no value. Fix: {flag}, or leave it out.")


def _take(found: Words, kind: str, flag: str, value: str) -> None:
    match kind:
        case "list":
            found.lists.setdefault(flag, []).append(value)
        case "text":
            found.texts[flag] = value
        case "count":
            found.counts[flag] = int(number(flag, value, int, least=1))
        case "number":
            found.sampling[flag] = number(flag, value, NUMBERS[flag])
