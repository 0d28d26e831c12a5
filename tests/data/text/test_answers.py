"""A prompt and an answer as one document, from texts and from messages."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.batch import IGNORE_LABEL
from surogate_core.data.encoded import EncodeContext, RowError
from surogate_core.data.text.answers import check_answer, encode_answer, text_or_messages
from surogate_core.errors import UserError
from surogate_testing.chat_templates import templated

USER, FOUR = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}


def trained(name: str, prompt: Any, answer: Any, **context: Any) -> tuple[str, str]:
    """(text that is not trained, text that is trained)."""
    tokenizer, _ = templated(name)
    document = encode_answer(prompt, answer, EncodeContext(tokenizer=tokenizer, sequence_len=64, **context))
    mask = document.labels != IGNORE_LABEL
    return tokenizer.decode(document.input_ids[~mask]), tokenizer.decode(document.input_ids[mask])


def test_texts_and_messages_give_the_same_document() -> None:
    expected = ("<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n\n", "Four.<|im_end|>")
    for prompt in ("Two and two?", [USER]):
        for answer in ("Four.", [FOUR]):
            assert trained("own", prompt, answer) == expected


def test_an_earlier_assistant_turn_of_the_prompt_is_not_trained() -> None:
    before, after = trained("own", [USER, {"role": "assistant", "content": "Five."}, USER], [FOUR])
    assert "Five." in before
    assert after == "Four.<|im_end|>"


def test_without_a_template_the_answer_follows_the_prompt() -> None:
    _, end = templated("none")
    assert trained("none", "Two and two? ", "Four.") == ("Two and two? ", f"Four.{end}")
    assert trained("own", "Hi ", "Hello", use_chat_template=False)[0] == "Hi "
    with pytest.raises(UserError, match="only a chat template"):
        trained("own", [USER], "Four.", use_chat_template=False)


def test_the_system_prompt_of_the_configuration_comes_first() -> None:
    assert "Be brief." in trained("own", "Two and two?", "Four.", system="Be brief.")[0]


def test_an_answer_that_does_not_end_with_the_assistant_is_a_bad_row() -> None:
    check_answer([FOUR], "chosen")
    for answer in ([FOUR, USER], [{"role": "assistant", "content": " "}]):
        with pytest.raises(RowError, match="field 'chosen' does not end with a message of the assistant"):
            check_answer(answer, "chosen")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "is empty"),
        (["Hi"], "item 1 is no message"),
        ([{"content": "Hi"}], "item 1 is no message"),
        ([{"role": "user", "content": 3}], "message 1 is no text"),
        ([{"role": "user", "content": "\ud800"}], "not Unicode"),
        ('[{"role": "user", "content": "Hi', "is not JSON"),
        (' [ { "role" : "user"', "is not JSON"),
        (" ", "is empty"),
        (3, "must be a string"),
        (None, "is null"),
    ],
)
def test_a_field_that_is_neither_text_nor_messages_is_a_bad_row(value: Any, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        text_or_messages({"prompt": value}, "prompt")


def test_messages_may_be_json_text() -> None:
    assert text_or_messages({"prompt": '[{"role": "user", "content": "Hi"}]'}, "prompt") == [
        {"role": "user", "content": "Hi"}
    ]


@pytest.mark.parametrize(
    "text",
    [
        '[{"city": "Paris"}]',
        ' [ {"city": "Paris"}]',
        '[{"city": ',
        "[]",
        "[1, 2]",
        '["role"]',
        '[{"role": "user", "name": "x"}]',
        '[{"role": "admin", "content": "x"}]',
        '[{"role": "user", "content": "x"}, {"city": "Paris"}]',
        '{"role": "user", "content": "x"}',
        '[{"a": 1, "a": 2}]',
    ],
)
def test_a_text_that_is_json_is_text(text: str) -> None:
    assert text_or_messages({"prompt": text}, "prompt") == text


def test_messages_may_call_tools_and_be_a_struct_of_lists() -> None:
    call = {"function": {"name": "f", "arguments": ""}}
    found = text_or_messages({"a": [{"role": "assistant", "content": None, "tool_calls": [call]}]}, "a")
    assert found == [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    arguments = {"function": {"name": "f", "arguments": {"x": None}}}
    assert text_or_messages({"a": [{"role": "assistant", "tool_calls": [arguments]}]}, "a") == [
        {"role": "assistant", "tool_calls": [arguments]}
    ]
    assert text_or_messages({"a": {"role": ["user"], "content": ["Hi"]}}, "a") == [{"role": "user", "content": "Hi"}]
    with pytest.raises(RowError, match="message 1: tool call 1"):
        text_or_messages({"a": [{"role": "assistant", "tool_calls": [3]}]}, "a")
