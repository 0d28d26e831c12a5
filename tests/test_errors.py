"""Messages of errors."""

from __future__ import annotations

import re

from surogate_core.errors import UserError


def test_a_value_of_a_file_does_not_drown_the_message() -> None:
    said = str(UserError(f"config.json: `layers` is {'x' * 100_000!r}, no number. Fix: correct it.\nA second line."))
    first, second = said.split("\n")
    assert first.startswith("config.json: `layers` is 'xxx")
    assert first.endswith("xxx', no number. Fix: correct it.")
    assert re.search(r"x …\(96,\d{3} characters\)… x", first)
    assert len(first) < 4000
    assert second == "A second line."


def test_other_messages_stay_as_they_are() -> None:
    message = "a" * 3600
    assert str(UserError(message)) == message
