"""Files that somebody else has made: JSON, regular expressions and sizes that end in a message, whatever they hold."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surogate_core.errors import UserError

LARGEST_JSON = 256 << 20
"""Bytes of a file; the index of a model with 100,000 tensors has less than 16 MiB."""
DEEPEST = 100
"""Levels of arrays and objects within each other. Python's own limit of calls is not much higher."""
PATTERN_SECONDS = 2.0
"""Seconds that the slow matches of a file's regular expressions may take together."""
_SLOW = 5e-5
"""Seconds of a match that count. One of an ordinary expression takes microseconds, and a model has 100,000 names."""
LONGEST_PATTERN = 1000
"""Characters of a regular expression."""

_SIZES: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 20,
    "num_key_value_heads": 1 << 20,
    "head_dim": 1 << 20,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 26,
    "moe_intermediate_size": 1 << 26,
    "vocab_size": 1 << 28,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "num_labels": 1 << 20,
}
"""Key of a model's configuration → its largest value: at least a hundred times the value of any model that there is."""
_MOST_EXPERTS = 1 << 21
"""Experts of all layers."""


class TwiceError(ValueError):
    """A JSON object has a name twice, of which a dictionary keeps only one."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of `json` that raises `TwiceError`."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise TwiceError(f"an object has the name {name!r} twice")
    return value


def open_regular(path: Path) -> int:
    """A descriptor to read a regular file, also through links; raises `OSError` for a pipe, a device, a directory."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_bytes(path: Path, most: int = LARGEST_JSON) -> bytes:
    """The content of a regular file. Raises `OSError`."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", str(path))
        return file.read(most)


def parsed(content: bytes | str, *, twice: bool = False) -> Any:
    """The value of a text of JSON. Raises `ValueError` also where Python or `DEEPEST` finds it nested too deep, for
    text that is not Unicode, and, unless `twice`, for a name that an object has twice.
    """
    try:
        value = json.loads(content, object_pairs_hook=None if twice else unique)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    _check(value)
    return value


def read_json(path: Path, *, twice: bool = False) -> Any:
    """The value of a JSON file. Raises `OSError`, and `ValueError` as `parsed`."""
    return parsed(read_bytes(path), twice=twice)


def _check(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one.values()
                below += one.keys()
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str) and not one.isascii():
                try:
                    one.encode()
                except UnicodeEncodeError:
                    raise ValueError("a text has half a surrogate pair") from None
        level, depth = below, depth + 1


def check_sizes(values: Mapping[str, Any], place: str) -> None:
    """Raise `UserError` where the sizes in a model's configuration are so large that building it would not end."""
    for key, most in _SIZES.items():
        value = values.get(key)
        if isinstance(value, int | float) and not abs(value) <= most:
            found = value if isinstance(value, float) or abs(value) < 10**18 else "beyond 10^18"
            raise UserError(
                f"{place}: {key} is {found}, and at most {most:,} is read. "
                f"Fix: take the config.json of the model again."
            )
    layers = values.get("num_hidden_layers")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        experts = values.get(key)
        if isinstance(layers, int) and isinstance(experts, int) and layers * experts > _MOST_EXPERTS:
            raise UserError(
                f"{place}: num_hidden_layers {layers} times {key} {experts} is more than {_MOST_EXPERTS:,} experts. "
                f"Fix: take the config.json of the model again."
            )
    for key, value in values.items():
        if isinstance(value, Mapping) and key in ("text_config", "config"):
            check_sizes(value, place)


def matchers(patterns: Mapping[str, str], place: str) -> Callable[[str, str], bool]:
    """(name of a pattern, text) → whether the pattern matches from the beginning of the text.

    All matches together have a time limit, as an expression of a few characters can take years. Raises `UserError`
    where it is over.
    """
    import regex

    compiled = {name: regex.compile(pattern) for name, pattern in patterns.items()}
    left = PATTERN_SECONDS

    def matches(name: str, text: str) -> bool:
        nonlocal left
        begin = time.monotonic()
        try:
            return compiled[name].match(text, timeout=max(left, 1e-3)) is not None
        except TimeoutError:
            raise UserError(
                f"{place}: the regular expression {name[:100]!r} takes more than {PATTERN_SECONDS:g} s to match. "
                f"Fix: write it without repeats of what repeats, such as (a+)+."
            ) from None
        finally:
            seconds = time.monotonic() - begin
            left -= seconds if seconds > _SLOW else 0.0

    return matches


def wrong_pattern(pattern: Any) -> str | None:
    """What is wrong with a regular expression for `matchers`, as the rest of a sentence, or None."""
    import regex

    if len(pattern) > LONGEST_PATTERN:
        return f"has {len(pattern)} characters, more than {LONGEST_PATTERN}"
    try:
        re.compile(pattern)
        regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    return None
