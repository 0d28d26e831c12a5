"""Passwords, tokens and signatures are replaced by ``***`` before a text leaves the process.

All code that shows a text uses it: errors, events, logs, reports, run.json, model cards and the trackers. It recognises
a secret by its place (the user part of a URL) or by its name (``X-Amz-Signature=``, ``api_key:``), and no other
secrets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_NAME = (
    r"(?:passw(?:or)?d|passphrase|pwd|client_?secret|secret(?:_?key)?|private_?key|credentials?|authorization"
    r"|api[-_]?key|access[-_]?key(?:[-_]?id)?|(?:access|auth|api|hf|bearer|session|security|refresh)[-_]?token)"
)
"""Names of values that are always secret. A bare ``token`` counts only in a query or as a whole key."""

_HINT = re.compile(r"sig|token|secret|pass|pwd|credential|key|auth|code", re.IGNORECASE)
# Every repetition has a limit, so that no text takes long.
_USER = re.compile(
    # The second form is for a secret with a slash, unless what follows the colon looks like a port and a path.
    r"(?<=://)(?:[^\s/?#\"'<>]{0,1000}|[^\s:/@?#\[\"'<>]{0,100}:(?!\d{1,5}(?:[/?#]|$))[^\s@\"'<>]{0,200})@(?=[^\s@])"
)
_QUERY = re.compile(
    r"([?&;#](?:[\w.%-]{0,60}"
    r"(?:signature|token|secret|passw(?:or)?d|pwd|credential|api[-_]?key|access[-_]?key|auth)[\w.%-]{0,60}"
    r"|sig|key|code)=)[^&\s#\"'<>\\]+",
    re.IGNORECASE,
)
_SET = re.compile(
    rf"(?<![?&;#\w.-])((?:(?:[\w.-]{{0,100}}[._-])?{_NAME}|(?:[\w.-]{{0,100}}\.)?token)=)"
    r"([^\s,}\])\"'\\]+|\"[^\"]*\"|'[^']*')",
    re.IGNORECASE,
)
_LINE = re.compile(
    rf"^([ \t{{-]{{0,200}}(?:(?:[\w-]{{0,100}}[_-])?{_NAME}|token)[\"']?[ \t]{{0,9}}:[ \t]{{1,200}})(?!null\b|~)\S.*$",
    re.IGNORECASE | re.MULTILINE,
)
_KEY = re.compile(rf"(?:.{{0,100}}[._-])?{_NAME}|token", re.IGNORECASE)


def masked(text: str) -> str:
    """The text without the user parts of its URLs and the values of ``name=value`` pairs whose name is a secret's."""
    if "://" in text:
        text = _USER.sub(f"{MASK}@", text)
    if "=" in text and _HINT.search(text):
        text = _QUERY.sub(rf"\g<1>{MASK}", text)
        text = _SET.sub(rf"\g<1>{MASK}", text)
    return text


def masked_yaml(text: str) -> str:
    """The same for a YAML text, whose ``name: value`` lines count too; the result is YAML."""
    return masked(_LINE.sub(rf"\g<1>'{MASK}'", text))


def masked_values(value: Any) -> Any:
    """The same for nested mappings and lists: texts are masked, and every text under a secret's name is replaced."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(item, str) and item and _KEY.fullmatch(str(key)) else masked_values(item)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(masked_values(item) for item in value)
    return value
