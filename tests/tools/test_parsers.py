"""The forms of tool calls: what templates write is read again, in pieces and whole, and other text stays text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate_core.bundles import ToolParserSpec
from surogate_core.data.text.chat import chat_of
from surogate_core.errors import UserError
from surogate_core.inference.tool_calls import tag_ids
from surogate_core.tools.checks import read_tools
from surogate_core.tools.choosing import core_parsers, parser_of
from surogate_core.tools.reading import Call, CallReader, Delta
from surogate_testing.chat_templates import SHIPPED, template_text, templated
from surogate_testing.suites import bundle_checks

SPECS = core_parsers()
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get"},
    {"name": "put", "parameters": {"properties": {"text": {"type": "string"}}}},
]
FORMS = {"chatml": "hermes", "qwen3": "hermes", "llama3": "llama3", "mistral": "mistral"}


def read(name: str, text: str, length: int = 1, **options: Any) -> CallReader:
    reader = CallReader(SPECS[name], FUNCTIONS, **options)
    found: list[Delta] = []
    for start in range(0, len(text), length):
        found += reader.feed(text[start : start + length])
    found += reader.close()
    assert "".join(delta.content for delta in found) == reader.content
    for number, call in enumerate(reader.calls):
        parts = [delta for delta in found if delta.number == number]
        assert (parts[0].id, parts[0].name, parts[0].arguments) == (call.id, call.name, "")
        assert "".join(part.arguments for part in parts) == call.arguments
    return reader


def made(calls: list[Call]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", list(SPECS))
def test_the_contract(name: str) -> None:
    for check in bundle_checks("tool_parser", SPECS[name]):
        check.call()


@pytest.mark.parametrize("name", SHIPPED)
def test_templates_find_their_parsers(name: str) -> None:
    found = parser_of(SPECS, template_text(name))
    assert (None if found is None else found.name) == FORMS.get(name)


@pytest.mark.parametrize("name", list(FORMS))
def test_what_a_template_writes_is_read_again(name: str) -> None:
    tokenizer, end = templated(name)
    arguments = {"text": 'a "b" } \\ [é]\n', "n": [1, {"x": None}]}
    function = {"name": "put", "arguments": arguments}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    chat, asked = chat_of(tokenizer), [{"role": "user", "content": "Hi"}]
    before = chat.render(asked, add_generation_prompt=True)
    text = chat.render([*asked, message])[len(before) :].strip().removesuffix(end)
    spec = parser_of(SPECS, chat.template)
    assert spec is not None
    for length in (1, 2, 5, len(text)):
        reader = read(spec.name, text, length)
        content = reader.content.replace("<think>", "").replace("</think>", "").strip()
        assert (content, made(reader.calls)) == ("", [("put", arguments)])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "hermes",
            'Let me see.\n<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>\n',
            "Let me see.",
            [("get", {"n": 1})],
        ),
        ("hermes", '<tool_call>{"arguments": {"n": "}"}, "name": "get"}</tool_call>', "", [("get", {"n": "}"})]),
        (
            "hermes",
            '<tool_call>{"name": "get", "arguments": {}}</tool_call> and '
            '<tool_call>{"name": "put", "arguments": {}}</tool_call>',
            " and",
            [("get", {}), ("put", {})],
        ),
        ("hermes", '<tool_call><tool_call>{"name": "get", "arguments": {}}</tool_call>', "<tool_call>", [("get", {})]),
        ("llama3", '{"name": "get", "parameters": {"n": 1}}', "", [("get", {"n": 1})]),
        (
            "llama3",
            '<|python_tag|>{"name": "get", "parameters": {}}; {"name": "put", "parameters": {}}',
            "",
            [("get", {}), ("put", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "get", "arguments": {}, "id": "abcdefghi"}, {"name": "put", "arguments": {}}]',
            "",
            [("get", {}), ("put", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS]get[ARGS]{"n": 1}[TOOL_CALLS]put{"text": "x"}',
            "",
            [("get", {"n": 1}), ("put", {"text": "x"})],
        ),
        (
            "qwen3-coder",
            "Yes.\n<tool_call>\n<function=put>\n<parameter=text>\n12\n</parameter>\n"
            "<parameter=n>\n[1]\n</parameter>\n</function>\n</tool_call>",
            "Yes.",
            [("put", {"text": "12", "n": [1]})],
        ),
    ],
)
def test_calls(name: str, text: str, content: str, calls: list[Any]) -> None:
    for length in (1, 2, 7, len(text)):
        reader = read(name, text, length)
        assert (reader.content, made(reader.calls)) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a < b and <tool_cal"),
        ("hermes", "<tool_call>nothing</tool_call> more\n"),
        ("hermes", '<tool_call>\n{"name": "get", "arguments": {"n": '),
        ("hermes", '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>\n'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {"a" 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": {}} oh'),
        ("llama3", '{"name": "get", "parameters": {}} and more'),
        ("llama3", ' {"answer": 1}'),
        ("llama3", 'I call {"name": "get", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS] what is this?"),
        ("mistral", '[TOOL_CALLS] [{"name": "get"'),
        ("qwen3-coder", "<tool_call>\n<function=get>\nx\n</function>\n</tool_call>"),
        ("qwen3-coder", "<tool_call>\n<function=get>"),
    ],
)
def test_text_that_is_no_call_stays_as_it_is(name: str, text: str) -> None:
    for length in (1, 3, len(text)):
        reader = read(name, text, length)
        assert (reader.content, reader.calls) == (text, [])


def test_ids_are_the_models_own_or_nine_letters_and_digits() -> None:
    calls = '[{"name": "get", "arguments": {}, "id": "abcdefghi"}, {"name": "get", "arguments": {}}]'
    first, second = read("mistral", f"[TOOL_CALLS] {calls}").calls
    assert first.id == "abcdefghi"
    assert second.id.isalnum()
    assert len(second.id) == 9


def test_one_call_only_and_calls_that_cannot_fail() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"n": 12}}</tool_call>'
    assert len(read("hermes", text * 2, several=False).calls) == 1
    reader = CallReader(SPECS["hermes"], FUNCTIONS, held=True)
    given = [delta for char in text[:-15] for delta in reader.feed(char)]
    assert [delta.arguments for delta in given] == ["", *'{"n": 1']
    # It is cut: what is there is given.
    assert reader.close() == []
    assert reader.calls[0].arguments == '{"n": 1'
    assert (reader.content, reader.cut) == ("", True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"text": "\\ud83d"}, "name": "put"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "put", "arguments": {"text": "\\ud83d"}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "put", "arguments": {"text": "\\ud83d"}, "id": "\\ud83d"}]'),
        ("llama3", '{"parameters": {"text": "\\ud83d"}, "name": "put"}'),
        ("qwen3-coder", '<tool_call><function=put><parameter=n>["\\ud83d"]</parameter></function></tool_call>'),
    ],
)
def test_half_of_a_surrogate_pair_stays_an_escape(name: str, text: str) -> None:
    (call,) = read(name, text).calls
    json.dumps(call.body(), ensure_ascii=False).encode()
    assert r"\ud83d" in call.arguments


def test_a_part_of_long_arguments_costs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    make = CallReader._call
    monkeypatch.setattr(CallReader, "_call", lambda self, *id: joined.append(1) or make(self, *id))
    text = '<tool_call>{"name": "put", "arguments": {"text": "' + "a" * 1000 + '"}}</tool_call>'
    assert len(read("hermes", text, held=True).calls[0].arguments) == 1012
    assert len(joined) == 2


def test_words_of_a_text_are_rules_of_the_tagged_form() -> None:
    properties = {
        "one": {"type": "string", "const": "a<b"},
        "some": {"type": "string", "enum": ["c", None]},
        "free": {"type": "string"},
    }
    function = {"name": "put", "parameters": {"properties": properties, "required": ["one"]}}
    rules = SPECS["qwen3-coder"].grammar([function], False, lambda tag: f'"{tag}"')
    (rule,) = [line for line in rules.splitlines() if line.startswith("one0: ")]
    assert [part in rule for part in ('("a<b")', '("c")', " TEXT ", "None")] == [True, True, True, False]


def test_a_file_of_tools_is_text(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(r'[{"name": "get", "description": "\ud800"}]')
    with pytest.raises(UserError, match="half of a surrogate pair"):
        read_tools(file, key="--tools")
    file.write_text('[{"name": "get"}]')
    assert read_tools(file, key="--tools") == [{"name": "get"}]


def test_tags_that_are_special_tokens() -> None:
    tokenizer, _ = templated("mistral")
    (token,) = tag_ids(tokenizer, SPECS["mistral"].tags)
    assert tokenizer.convert_ids_to_tokens(token) == "[TOOL_CALLS]"
    assert tag_ids(tokenizer, SPECS["hermes"].tags) == frozenset()  # tokens of the text


def test_a_name_and_a_priority_decide() -> None:
    own = ToolParserSpec(
        name="own", fits=lambda template: True, open=SPECS["hermes"].open, grammar=SPECS["hermes"].grammar
    )
    both = {**SPECS, "own": own}
    with pytest.raises(UserError, match=r"fits the tool parsers hermes and own\. Fix: --tool-parser hermes"):
        parser_of(both, template_text("qwen3"))
    assert parser_of(both, "no calls") is own
    found = parser_of(both, template_text("qwen3"), name="llama3")
    assert found is not None
    assert found.name == "llama3"
    with pytest.raises(UserError, match=r"--tool-parser lama3: there is no such parser\. Fix: llama3"):
        parser_of(both, "", name="lama3")
