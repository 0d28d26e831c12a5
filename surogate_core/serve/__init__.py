"""A server of the OpenAI API: requests and answers, a queue before the engine, and HTTP."""

import string
from importlib.util import find_spec

from surogate_core.errors import MachineError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only programs of this machine reach."""

LEAST_TOKEN = 16
"""Characters of the shortest token that a user may choose."""
_ALPHABET = frozenset(string.ascii_letters + string.digits + string.punctuation)


def require_packages() -> None:
    """Raises `MachineError` if a package that speaks HTTP, or one that constrains answers, is not installed."""
    missing = [name for name in ("starlette", "uvicorn", "llguidance") if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"A server needs {' and '.join(missing)}, which this Python does not have. "
            f"Fix: pip install 'surogate-core[serve]'"
        )


def is_token(text: str) -> bool:
    """Whether a text can be a token that clients send in a header."""
    return len(text) >= LEAST_TOKEN and _ALPHABET.issuperset(text)
