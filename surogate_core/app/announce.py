"""What a command does in the seconds before its first output, for somebody who waits at a terminal."""

from __future__ import annotations

import sys


def announce(text: str) -> None:
    """Print a line to stderr if it is a terminal; scripts and pipes see only what the command finds."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
