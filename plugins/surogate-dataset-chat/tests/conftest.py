"""The embedded tokenizer, with its own template and with others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from surogate_dataset_chat import EMBEDDED_TOKENIZER
from transformers import PreTrainedTokenizerBase

from surogate_core.service.data import load_tokenizer
from surogate_testing import chat_templates

embedded = partial(load_tokenizer, EMBEDDED_TOKENIZER)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded tokenizer with its own template."""
    return embedded()


@pytest.fixture(scope="session")
def templated() -> Callable[[str], Any]:
    """The embedded tokenizer with a template, and that template's end-of-turn token."""
    return partial(chat_templates.templated, make=embedded)
