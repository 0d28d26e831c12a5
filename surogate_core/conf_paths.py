"""Where the core's own config files are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CONFIG_NAME = "config"
"""The primary config: the embedded default."""


@cache
def conf_dir() -> Path:
    """The core's ``conf``: inside the package when it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def expanded(path: str) -> str:
    """`~` replaced by the user's home directory; the home of a user that does not exist stays as it is."""
    if not path.startswith("~"):
        return path
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        return path
