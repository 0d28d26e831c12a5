"""Reasons why a row's field cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.data.encoded import RowError
from surogate_core.data.fields import required


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, "field 'messages' is null"),
        ({"messages": None, "message": None}, "field 'messages' is null"),
        ({"messages": None, "message": []}, "field 'messages' is null; did you mean 'message'?"),
        ({"message": None}, "field 'messages' is missing, the row has 'message'"),
        ({}, "field 'messages' is missing, the row has no fields"),
        (
            {"conversations": [{"from": "human", "value": "Hi"}]},
            "field 'messages' is missing, the row has 'conversations'; type: auto reads such rows",
        ),
    ],
)
def test_a_hint_names_another_field_that_has_a_value(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as raised:
        required(row, "messages")
    assert str(raised.value) == reason
