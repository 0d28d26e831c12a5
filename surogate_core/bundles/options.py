"""What bundles of every kind have in common."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoOptions:
    """The options of a bundle that has none."""
