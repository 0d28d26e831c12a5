"""Where the core's own config files are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CONFIG_NAME = "config"
"""The primary config: the embedded default."""


@cache
def conf_dir() -> Path:
    """The core's ``conf``: inside the package when it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"
