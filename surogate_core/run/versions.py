"""Versions of libraries that this version of Surogate was tested with."""

from __future__ import annotations

import torch

TESTED = (2, 13)
"""The newest torch (major, minor) that the tests have run with."""


def untested_torch(version: str = torch.__version__) -> list[str]:
    """A note about a torch that is newer than the tested ones; it is not refused."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if found <= TESTED:
        return []
    newest = ".".join(map(str, TESTED))
    return [f"torch {version} is newer than {newest}, the newest that this version of Surogate was tested with."]
