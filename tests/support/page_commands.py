"""The shell commands of README.md and docs/, line by line.

Blocks of the language ``sh`` are commands. ``<!-- not run: WHY -->`` above a block says that no test can run it here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pages import Block, blocks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks/evidence").glob("*.md")),
    *sorted(ROOT.glob("plugins/*/docs/*.md")),
]
GUIDES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
    *sorted((ROOT / "docs/howto").glob("*.md")),
]
"""Pages whose commands are run, one after the other, as a reader types them."""


@dataclass(frozen=True)
class Command:
    """One command of a page."""

    page: Path
    line: int
    words: tuple[str, ...]
    mark: str
    """The comment above its block."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} {' '.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    """Every command of the page's ``sh`` blocks."""
    for block in blocks(page):
        if block.language == "sh":
            yield from commands_of(block)


def commands_of(block: Block) -> Iterator[Command]:
    """The commands of one block: continued lines are joined, comments left out, lists (&&, |) cut."""
    for words in _lists(block.text.replace("\\\n", " ")):
        yield Command(block.page, block.line, tuple(words), block.mark)


def _lists(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("&|;"):
                yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words
