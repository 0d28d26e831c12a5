"""A tokenizer's files before transformers reads them, and panics of the Rust code that reads them."""

from __future__ import annotations

import base64
import binascii
import errno
import json
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from surogate_core.errors import UserError
from surogate_core.files.foreign import open_regular, read_bytes, read_json

TOKENIZER = "tokenizer.json"
_JSON = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
_OTHER = ("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model")
_LARGEST = 1 << 30
"""Bytes of a file; a vocabulary of 256,000 tokens has 40 MB."""
_LARGEST_TEMPLATE = 4 << 20
_MOST_GROWTH = 1000
"""Characters that the rules may make of one character. The Unicode forms make 18 of one at most."""
_WORDS = 200
"""Characters of a panic's message that are shown."""

_loaded: dict[str, None] = {}
"""Directories of the tokenizers that were loaded."""


def check_files(directory: Path, name: str) -> None:
    """Raise `UserError` for a file that no program should read on: a pipe, too large, nested too deep, rules that write
    far more than they read. `name`: what the user called the tokenizer.
    """
    for file, most in (*((f, _LARGEST) for f in _OTHER), *((f, _LARGEST_TEMPLATE) for f in _templates(directory))):
        _read(directory / file, name, lambda path, most=most: _check_size(path, most))
    for file in _JSON:
        values = _read(directory / file, name, lambda path: read_json(path, twice=True))  # transformers takes the last
        longest = values.get("model_max_length") if isinstance(values, dict) else None
        if file == _JSON[0] and not isinstance(longest, int | float | None):
            raise UserError(
                f"tokenizer {name}: {directory / file}: model_max_length is {longest!r:.60}, not a number. "
                f"Fix: correct it."
            )
    values = _read(directory / TOKENIZER, name, read_once)
    if isinstance(values, dict):
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (growth := _growth(values.get(part))) > _MOST_GROWTH:
                raise UserError(
                    f"tokenizer {name}: {directory / TOKENIZER}: the rules of its {part} write up to {growth:,.0f} "
                    f"characters for one, and at most {_MOST_GROWTH:,} are read. Fix: take the tokenizer of the model."
                )
    _loaded[str(directory)] = None


def read_once(path: Path) -> Any:
    """The value of a file of JSON that several callers read. Raises `OSError`, `ValueError`."""
    status = path.stat()
    return _content(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _content(path: Path, changed: int, size: int) -> Any:
    try:
        return json.loads(read_bytes(path, _LARGEST))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _templates(directory: Path) -> list[str]:
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    return ["chat_template.jinja", *(str(path.relative_to(directory)) for path in more)]


def _read(path: Path, name: str, read: Any) -> Any:
    try:
        return read(path) if path.exists() or path.is_symlink() else None
    except OSError as error:
        raise UserError(f"tokenizer {name}: {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"tokenizer {name}: {path} is not valid JSON: {error}. Fix: copy the file again.") from error


def _check_size(path: Path, most: int) -> None:
    descriptor = open_regular(path)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", str(path))


def _growth(rules: Any, depth: int = 0) -> float:
    """Characters that rules make of one at most, apart from the Unicode forms."""
    if not isinstance(rules, Mapping) or depth > 8:
        return 1.0
    found = 1.0
    for key in ("normalizers", "pretokenizers", "decoders"):
        for one in rules.get(key) or () if isinstance(rules.get(key), list) else ():
            found = min(found * _growth(one, depth + 1), 1e300)
    match rules:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            found *= max(1.0, len(new) / max(len(old), 1))
        case {"type": "Replace", "pattern": {"Regex": str()}, "content": str(new)}:
            found *= 1 + len(new)  # an expression may match the empty text beside each character
        case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
            found *= _longest(text)
    return found


def _longest(charsmap: str) -> int:
    """Bytes of the longest replacement in SentencePiece's map: the size of a trie, the trie, texts that end in NUL."""
    try:
        blob = base64.b64decode(charsmap)
        (size,) = struct.unpack_from("<I", blob)
    except (binascii.Error, ValueError, struct.error):
        return 1  # tokenizers refuses it
    return max(map(len, blob[4 + size :].split(b"\0")), default=1) or 1


# ------------------------------------------------------------------------------- panics


def is_panic(error: BaseException) -> bool:
    """Whether Rust code below Python has panicked, which is no `Exception` and whose class cannot be imported."""
    return type(error).__name__ == "PanicException"


def panic_error(error: BaseException, name: str = "") -> UserError:
    """What a panic says to the user. `name`: the tokenizer; otherwise those that were loaded."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _WORDS else f"{text[:_WORDS]}…"
    names = name or ", ".join(_loaded) or "of this run"
    return UserError(
        f"tokenizer {names}: its rules failed: {text}. Fix: take the tokenizer of the model; a regular expression of "
        f"{TOKENIZER} may need too many steps."
    )


@contextmanager
def named_panics(name: str) -> Iterator[None]:
    """Raise `UserError` for a panic."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise panic_error(error, name) from error
        raise
