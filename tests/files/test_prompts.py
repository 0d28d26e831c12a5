"""Prompts as JSON lines: what is no text."""

from __future__ import annotations

import pytest

from surogate_core.errors import UserError
from surogate_core.files.prompts import prompt_rows


def test_half_of_a_pair_is_named_with_its_line() -> None:
    whole = '{"prompt": "\\ud83d\\ude00"}'
    assert prompt_rows(whole, "a.jsonl") == [("a.jsonl:1", {"prompt": "\U0001f600"})]
    with pytest.raises(UserError, match=r"a\.jsonl:2: has half of a surrogate pair"):
        prompt_rows(f'{whole}\n{{"prompt": "\\ud83d"}}', "a.jsonl")
