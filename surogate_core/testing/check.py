"""One check of the kit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class NotApplicable(Exception):  # noqa: N818 - an outcome, not an error
    """The check says nothing about this bundle on this machine; the message is the reason."""


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
    run: Callable[[], None]
    """Raises `AssertionError` (or whatever the bundle raises) where it does not hold, `NotApplicable` with a reason."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.title}"
