"""One check of the kit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from surogate_testing.guard import SECONDS, NotApplicable, guarded

__all__ = ["Check", "NotApplicable", "ensure"]


def ensure(holds: bool, message: str) -> None:
    """Raise `AssertionError` with the message unless it holds; unlike `assert`, also under ``python -O``."""
    if not holds:
        raise AssertionError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A requirement on a plugin, or on one bundle that it offers."""

    subject: str
    """``plugin`` or the kind and name of the bundle, e.g. ``optimizer adamw``."""
    title: str
    """The requirement, in words."""
    call: Callable[[], None]
    """The check itself: raises `AssertionError`, whatever the bundle raises, or `NotApplicable`."""
    package: Path | None = None
    """The plugin's module file or package directory; failures name its lines."""
    seconds: float = SECONDS
    """Time limit in seconds."""
    apart: bool = False
    """Whether it runs in a child process, if possible."""

    def run(self) -> None:
        """Run it. Raises `CheckFailedError`, an `AssertionError`, if the requirement is not met; `NotApplicable` with a
        reason.
        """
        guarded(self.call, seconds=self.seconds, package=self.package, apart=self.apart)

    def __str__(self) -> str:
        return f"{self.subject}: {self.title}"
