"""Tool calls in replies."""

from __future__ import annotations

import pytest
from surogate_environment_verifiers import surogate_environment
from surogate_environment_verifiers.calls import calls_of
from surogate_environment_verifiers.options import VerifiersOptions

from surogate_core.plugin import MachineError, UserError


def test_calls_are_taken_out_of_the_text() -> None:
    text = 'I look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text += '<tool_call>{"name": "end"}</tool_call>'
    assert calls_of(text) == ("I look.", [("add", '{"a": 1}'), ("end", "{}")])
    assert calls_of('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>') == ("", [("f", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<think><tool_call>{"name": "f"}</tool_call></think> done',
        '<tool_call>{"name": "f"}',
    ],
)
def test_what_is_no_call_stays_in_the_text(text: str) -> None:
    assert calls_of(text) == (text, [])


def test_a_module_must_be_named() -> None:
    with pytest.raises((UserError, MachineError), match=r"environment\.module is not set"):
        surogate_environment().build(VerifiersOptions())
