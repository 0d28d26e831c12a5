"""The example files and the commands that their headers show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def commands(example: Path) -> list[list[str]]:
    """The words after ``surogate`` of each command in the comments, the main one first."""
    comments = [line[1:] for line in example.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    own_lines = [line.strip() for line in comments if line.startswith("   surogate ")]
    inline = [m for line in comments for m in re.findall(r"`(surogate [^`]*examples/[^`]*)`", line)]
    return [shlex.split(text)[1:] for text in (*own_lines, *inline)]
