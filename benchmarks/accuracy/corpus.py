"""Real text of a Linux machine with Python: sources, documentation, manual pages, licences and headers.

The names of the files decide their order. A text is left out if it was seen before, or if most of its long lines were.
A hash of its content decides whether it is held out.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from parity_text import HEADERS, PYTHON, roots

KINDS: Mapping[str, Sequence[str]] = {
    "sources and documentation": (*PYTHON, ".txt", ".pyi", ".pl", ".pm", ".pod", ".sh", ".tex", ".adoc"),
    "headers": (*HEADERS, ".c", ".cpp", ".cu"),
    "manual pages": tuple(f".{section}" for section in "12345678"),
    "licences": ("copyright", "LICENSE", "COPYING", "NOTICE", "AUTHORS", "README"),
}
"""Kind of text → endings of its files, without ``.gz``."""
PLACES = (
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/share/common-licenses",
    "/usr/share/perl",
    "/usr/include",
    "/usr/src",
)
HELD_OUT = 64
"""One text in this many is held out."""
SIZES = (256, 400_000)
"""Bytes of the shortest and the longest text."""
LONG = 40
"""Characters of a line that counts as a repetition if another text has it."""
REPEATED = 0.5
"""Largest share of long lines that other texts have."""
LETTERS = 0.4
"""Smallest share of letters and spaces, which tables of numbers and encoded data do not have."""
_ROFF = re.compile(r"\\f[A-Z0-9]|\\f\(..|\\[&|^/,]|\\s[-+]?\d|\\\((?:co|rs)")


@dataclass(slots=True)
class Counts:
    """What was found of one kind of text."""

    texts: int = 0
    held: int = 0
    size: int = 0
    """Bytes of the texts, held-out ones included."""
    repeated: int = 0
    """Files that were left out as repetitions."""


@dataclass(slots=True)
class Corpus:
    """Texts to train on and held-out texts."""

    train: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    counts: dict[str, Counts] = field(default_factory=dict)


def kind_of(path: Path) -> str | None:
    """The kind of a file's text, by its name."""
    name = path.name.removesuffix(".gz")
    return next((kind for kind, endings in KINDS.items() if name.endswith(tuple(endings))), None)


def _files(places: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, path) of the files, in an order that the names decide."""
    found: dict[str, Path] = {}
    for place in places:
        for path in place.rglob("*"):
            if kind_of(path) is not None and path.is_file() and not path.is_symlink():
                found.setdefault(str(path.relative_to(place)), path)
    yield from sorted(found.items(), key=lambda item: (zlib.crc32(item[0].encode()), item[0]))


def read(path: Path) -> str | None:
    """The text of a file; None if it is no text or its size is out of bounds."""
    try:
        if not SIZES[0] // 4 <= path.stat().st_size <= SIZES[1]:
            return None
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").replace("\r\n", "\n")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return None
    if path.name.removesuffix(".gz").endswith(tuple(KINDS["manual pages"])):
        text = plain(text)
    fits = SIZES[0] <= len(text.encode()) <= SIZES[1]
    return text if fits and _is_text(text) else None


def _is_text(text: str) -> bool:
    sample = text[:4_000]
    return sum(c.isalpha() or c.isspace() for c in sample) >= LETTERS * len(sample) and "\0" not in sample


def plain(roff: str) -> str:
    """A manual page without the commands of roff."""
    lines = []
    for line in roff.splitlines():
        if line.startswith((".SH", ".SS")):
            line = "\n" + line[3:].strip().strip('"')
        elif line.startswith((".", "'")):
            line = " ".join(line.split()[1:]) if line.startswith((".B ", ".I ", ".BR ", ".IR ", ".Nm ", ".Nd ")) else ""
        lines.append(_ROFF.sub("", line).replace(r"\-", "-").replace(r"\e", "\\"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def collect(*, limit: int, places: Sequence[Path] | None = None) -> Corpus:
    """At most `limit` bytes of text."""
    if places is None:
        places = [*roots(), *(Path(place) for place in PLACES if Path(place).is_dir())]
    corpus = Corpus()
    texts: set[bytes] = set()
    lines: set[int] = set()
    size = 0
    for name, path in _files(places):
        if size >= limit:
            break
        text = read(path)
        if text is None:
            continue
        counts = corpus.counts.setdefault(kind_of(Path(name)) or "", Counts())
        digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
        own = {zlib.crc32(line.strip().encode()) for line in text.splitlines() if len(line.strip()) >= LONG}
        if digest in texts or len(own & lines) > REPEATED * len(own):
            counts.repeated += 1
            continue
        texts.add(digest)
        lines |= own
        held = int.from_bytes(digest[:4], "little") % HELD_OUT == 0
        (corpus.held if held else corpus.train).append(text)
        counts.texts, counts.held = counts.texts + (not held), counts.held + held
        counts.size += len(text.encode())
        size += len(text.encode())
    if not corpus.held and len(corpus.train) > 1:
        corpus.held.append(corpus.train.pop())  # a small corpus
    return corpus
