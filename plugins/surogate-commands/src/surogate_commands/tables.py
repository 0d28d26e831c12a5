"""Tables that commands print."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], *, texts: int) -> list[str]:
    """Lines of cells in columns, of which the first `texts` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    found = []
    for line in lines:
        left, right = list(map(str.ljust, line[:texts], widths)), list(map(str.rjust, line[texts:], widths[texts:]))
        found.append("  ".join([*left, *right]).rstrip())
    return found
