"""Errors that end a run, by their cause; the CLI maps each to its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surogate_core.masking import masked

_HEAD, _TAIL = 2600, 1000
"""Characters that are shown of the beginning and of the end of a longer line, which has the fix."""


class SurogateError(Exception):
    """Base of the errors that are reported in one message, without a traceback.

    Secrets in the message are masked, and the middle of a very long line is left out: it shows a value of a file.
    """

    exit_code = 1

    def __init__(self, message: str):
        super().__init__("\n".join(map(_shortened, masked(message).split("\n"))))


def _shortened(line: str) -> str:
    out = len(line) - _HEAD - _TAIL
    return line if out <= 100 else f"{line[:_HEAD]} …({out:,} characters)… {line[-_TAIL:]}"


class UserError(SurogateError, ValueError):
    """The user's input is wrong: the message names the thing, the place and the fix."""

    exit_code = 2


class MachineError(SurogateError, RuntimeError):
    """The input is right but this machine cannot do it (no GPU, out of memory, disk full)."""

    exit_code = 3


LONGEST_KEY = 200
"""Characters that are shown of a key."""


def printable(text: str) -> str:
    """The text with escapes for characters that a terminal would interpret or not show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake in a configuration.

    `key` is the dotted key or option, `message` says what is wrong, `where` is ``file:line`` or
    ``command line`` (empty when unknown), `fix` is what to type instead (empty when unknown).
    """

    key: str
    message: str
    where: str = ""
    fix: str = ""
    needs: str = ""
    """The distribution of a plugin that is not installed and would mend it."""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        fix = f" Fix: {self.fix}" if self.fix else ""
        # A key or a value may be any text of a file.
        key = self.key if len(self.key) <= LONGEST_KEY else f"{self.key[:LONGEST_KEY]}…"
        return printable(f"{key}{place}: {self.message}{fix}")


class ConfigError(UserError):
    """Every mistake found in a configuration, reported together."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        lines = [str(p) for p in self.problems]
        if len(lines) == 1:
            super().__init__(lines[0])
        else:
            listed = "\n".join(f"  - {line}" for line in lines)
            super().__init__(f"{len(lines)} mistakes in the configuration:\n{listed}")


class PluginError(UserError):
    """A plugin that the run asks for is missing, forbidden, broken or ambiguous."""
