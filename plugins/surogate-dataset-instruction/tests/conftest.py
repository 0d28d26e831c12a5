"""A tokenizer with chat templates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surogate_testing import chat_templates


@pytest.fixture(scope="session")
def templated() -> Callable[[str], Any]:
    """A tokenizer of bytes with a template ("none": without), and that template's end-of-turn token."""
    return chat_templates.templated
