"""BPE over characters with bytes for the rest, as SentencePiece makes it: llama.cpp's tokenizer model ``llama``.

llama.cpp merges the pair whose token has the largest score. Hugging Face merges the pair that is first in a list. Both
give the same tokens if all pairs that make a token are in the list, and those of one token one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Gemma's pre-tokenizer, which finds nothing to split: no space is left."""
UNREACHED = -1e9
"""Score of a token that no pair makes."""


def is_of_pieces(values: Mapping[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` is BPE over characters."""
    return bool(values["model"]["type"] == "BPE" and values["model"].get("byte_fallback"))


def prefix(values: Mapping[str, Any]) -> str | None:
    """Where a space is put in front: ``always`` (of every text between special tokens), ``first`` or ``never``; None if
    spaces are treated in another way.
    """
    steps, metaspace = _steps(values.get("normalizer")), values.get("pre_tokenizer")
    prepends, replaces = {"type": "Prepend", "prepend": SPACE}, _replaces(steps[-1]) if steps else False
    if replaces and metaspace in (None, _SPACES):
        return "always" if steps[:-1] == [prepends] else "never" if len(steps) == 1 else None
    if steps or not metaspace or metaspace["type"] != "Metaspace":
        return None
    if metaspace["replacement"] != SPACE or metaspace.get("split", True):
        return None
    return str(metaspace["prepend_scheme"])


def _steps(normalizer: Mapping[str, Any] | None) -> list[Any]:
    if normalizer is None:
        return []
    return list(normalizer["normalizers"]) if normalizer["type"] == "Sequence" else [normalizer]


def _replaces(step: Mapping[str, Any]) -> bool:
    return step == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def scores(values: Mapping[str, Any]) -> dict[str, float] | None:
    """Token → score by which llama.cpp merges as the list does; None if no scores can."""
    pairs = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in values["model"]["merges"]]
    special = {added["content"] for added in values["added_tokens"]}
    made = ["".join(pair) for pair in pairs]
    found: dict[str, float] = {}
    for number, token in enumerate(made):
        if token in found and made[number - 1] != token:
            return None
        found.setdefault(token, -float(number))
    vocabulary = values["model"]["vocab"].keys() - special
    vocabulary = {token for token in vocabulary if not BYTE.fullmatch(token)}
    listed = set(pairs)
    for token in vocabulary:
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        if any(a in vocabulary and b in vocabulary and (a, b) not in listed for a, b in splits):
            return None
    return found
