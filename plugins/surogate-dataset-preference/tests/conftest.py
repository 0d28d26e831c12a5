"""The embedded tokenizer with chat templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chat_templates
import pytest


@pytest.fixture(scope="session")
def templated() -> Callable[[str], Any]:
    """The embedded tokenizer with a template ("none": without), and that template's end-of-turn token."""
    return chat_templates.templated
