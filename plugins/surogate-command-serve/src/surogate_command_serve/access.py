"""Who may ask a server: addresses of its own machine, and tokens."""

import string

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only programs of this machine reach."""

LEAST_TOKEN = 16
"""Characters of the shortest token that a user may choose."""
_ALPHABET = frozenset(string.ascii_letters + string.digits + string.punctuation)


def is_token(text: str) -> bool:
    """Whether a text can be a token that clients send in a header."""
    return len(text) >= LEAST_TOKEN and _ALPHABET.issuperset(text)
