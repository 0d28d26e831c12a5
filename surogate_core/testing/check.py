"""One check of the kit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from surogate_core.testing.guard import SECONDS, NotApplicable, guarded

__all__ = ["Check", "NotApplicable", "ensure"]


def ensure(holds: bool, message: str) -> None:
    """Raise `AssertionError` with the message unless it holds; unlike `assert`, also under ``python -O``."""
    if not holds:
        raise AssertionError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that must hold of a plugin, or of one bundle that it offers."""

    subject: str
    """``plugin`` or the kind and name of the bundle, e.g. ``optimizer adamw``."""
    title: str
    """What must hold."""
    call: Callable[[], None]
    """The check itself: raises `AssertionError`, whatever the bundle raises, or `NotApplicable`."""
    package: Path | None = None
    """The plugin's module file or package directory, whose lines failures name."""
    seconds: float = SECONDS
    """The time that it may take."""
    apart: bool = False
    """Whether it runs in a child process, where that is possible."""

    def run(self) -> None:
        """Raises `CheckFailedError`, an `AssertionError`, where it does not hold; `NotApplicable` with a reason."""
        guarded(self.call, seconds=self.seconds, package=self.package, apart=self.apart)

    def __str__(self) -> str:
        return f"{self.subject}: {self.title}"
