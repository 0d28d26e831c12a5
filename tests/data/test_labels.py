"""Labels: the assistant's words and the tokens that end its turns, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surogate_core.data.chat import encode_by_pieces
from surogate_core.data.labels import tokenize_conversation
from surogate_core.data.tokenize import RowError
from surogate_core.errors import UserError

ALL = ["embedded", "chatml", "chatml-marked-inside", "llama3", "qwen3", "mistral"]

MULTI_TURN = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "I am Ada, a cook.\nAnd you?"},
]


def trained_text(tokenizer: Any, messages: Any, tools: Any = None) -> list[str]:
    """The decoded runs of trained tokens."""
    document = tokenize_conversation(tokenizer, messages, tools)
    ids, trained = document.input_ids.tolist(), (document.labels >= 0).tolist()
    assert len(ids) == len(trained)
    runs = groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in pairs]) for mine, pairs in runs if mine]


@pytest.mark.parametrize("name", ALL)
def test_each_turn_and_its_end_token_are_trained(templated: Callable[..., Any], name: str) -> None:
    tokenizer, end = templated(name)
    first, second = f"Hello!{end}", f"I am Ada, a cook.\nAnd you?{end}"
    expected = {
        "qwen3": [first, f"<think>\n\n</think>\n\n{second}"],
        "mistral": [f" {first}", f" {second}"],  # the space belongs to the answer's first token
    }
    assert trained_text(tokenizer, MULTI_TURN) == expected.get(name, [first, second])


@pytest.mark.parametrize("name", [name for name in ALL if name != "mistral"])
def test_system_and_user_tokens_are_never_trained(templated: Callable[..., Any], name: str) -> None:
    tokenizer, end = templated(name)
    system = {"role": "system", "content": "Answer in one word."}
    found = trained_text(tokenizer, [system, *MULTI_TURN[:2]])
    assert [text.removeprefix("<think>\n\n</think>\n\n") for text in found] == [f"Hello!{end}"]


@pytest.mark.parametrize("name", ALL)
def test_the_ids_are_those_of_the_whole_rendered_conversation(templated: Callable[..., Any], name: str) -> None:
    tokenizer, _ = templated(name)
    text = tokenizer.apply_chat_template(MULTI_TURN, tokenize=False)
    ids = tokenize_conversation(tokenizer, MULTI_TURN).input_ids.tolist()
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == (1 if name in ("llama3", "mistral") else 0)


def test_thinking_is_trained_where_it_is_shown(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("qwen3")
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\n2"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>\nsum again\n</think>\n\n4"},
    ]
    assert trained_text(tokenizer, messages) == [f"2{end}", f"<think>\nsum again\n</think>\n\n4{end}"]


def test_tool_calls_are_trained_and_their_results_are_not(templated: Callable[..., Any]) -> None:
    tokenizer, end = templated("qwen3")
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
    ]
    found = trained_text(tokenizer, messages, [{"name": "weather"}])
    assert found == [f"<tool_call>weather</tool_call>{end}", f"<think>\n\n</think>\n\nIt is sunny.{end}"]


TEXT = st.text(st.sampled_from("abc é\n.<|1漢😀"), min_size=1, max_size=12).filter(lambda t: t.strip() == t)


@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), system=st.none() | TEXT)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["embedded", "chatml", "chatml-marked-inside", "llama3"])
def test_trained_tokens_decode_to_the_assistants_texts(
    templated: Callable[..., Any], name: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    tokenizer, end = templated(name)
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    assert trained_text(tokenizer, messages) == [answer + end for _, answer in turns]


@pytest.mark.parametrize("turns", [MULTI_TURN, MULTI_TURN[1:], [*MULTI_TURN, {"role": "user", "content": "Bye"}]])
def test_marks_and_prefixes_agree(templated: Callable[..., Any], turns: Any) -> None:
    marked, plain = templated("embedded")[0], templated("chatml")[0]
    found, expected = tokenize_conversation(marked, turns), tokenize_conversation(plain, turns)
    assert found.labels.tolist() == expected.labels.tolist()


def test_a_tokenizer_without_offsets_encodes_part_by_part(templated: Callable[..., Any]) -> None:
    tokenizer, _ = templated("embedded")
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    start = text.index("Hello")
    ids, ((first, last),) = encode_by_pieces(tokenizer, text, [(start, start + len("Hello<|im_end|>"))])
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids[first:last]) == "Hello<|im_end|>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ raise_exception('pairs only') }}", "refuses the conversation: pairs only"),
        ("{{ messages[0].nothing.at.all }}", "refuses the conversation"),
        ("{% for m in messages %}{{ m.role }}", "refuses the conversation"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out message 2"),
        ("{% for m in messages | reverse %}{{ m.role + m.content }};{% endfor %}", "does not show where"),
    ],
)
def test_a_template_that_cannot_be_used_is_a_reason(
    templated: Callable[..., Any], template: Any, expected: str
) -> None:
    tokenizer, _ = templated("chatml")
    before = tokenizer.chat_template
    try:
        tokenizer.chat_template = template
        with pytest.raises(RowError, match=expected):
            tokenize_conversation(tokenizer, MULTI_TURN)
    finally:
        tokenizer.chat_template = before


def test_a_tokenizer_without_a_template_ends_the_run(templated: Callable[..., Any]) -> None:
    tokenizer, _ = templated("chatml")
    before, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(UserError, match=r"has no chat template.*Fix: set `tokenizer`"):
            tokenize_conversation(tokenizer, MULTI_TURN)
    finally:
        tokenizer.chat_template = before


def test_mistral_refuses_a_system_turn_as_a_bad_row(templated: Callable[..., Any]) -> None:
    with pytest.raises(RowError, match="Only user and assistant roles"):
        tokenize_conversation(templated("mistral")[0], [{"role": "system", "content": "x"}, *MULTI_TURN])
