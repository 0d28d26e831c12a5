"""The command as a plugin's."""

from __future__ import annotations

from typing import Any

SUROGATE_PLUGIN = "command-plan"


def test_conformance(surogate_check: Any) -> None:
    surogate_check.run()
