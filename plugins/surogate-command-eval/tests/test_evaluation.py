"""Held-out figures: which models are compared."""

from __future__ import annotations

import math

import pytest
from surogate_command_eval.evaluation import _figures

from surogate_core.service.inference import DocumentSums


def test_other_tokens_are_not_compared() -> None:
    documents = [
        DocumentSums(loss=2.0, weight=2.0, tokens=2, hits=1),
        DocumentSums(loss=1.0, weight=1.0, tokens=1, hits=0),
    ]
    first = _figures("a", documents, "x", None)
    assert _figures("b", documents, "y", (first, documents)).difference is None
    assert _figures("b", documents, "x", (first, documents)).difference == 0
    assert first.perplexity == pytest.approx(math.e)
