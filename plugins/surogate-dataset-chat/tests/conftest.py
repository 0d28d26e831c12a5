"""The embedded tokenizer, with its own template and with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chat_templates
import pytest
from transformers import PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded tokenizer with its own template."""
    return chat_templates.templated("embedded")[0]


@pytest.fixture(scope="session")
def templated() -> Callable[[str], Any]:
    """The embedded tokenizer with a template, and that template's end-of-turn token."""
    return chat_templates.templated
