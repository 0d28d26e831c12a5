"""Fields that name tools and the form of an answer, and messages with calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from surogate_command_serve.asks import Ask, RequestError, read
from surogate_command_serve.tool_fields import ANY_OBJECT

from surogate_core.service.inference import MOST_TOOLS

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
GET: dict[str, Any] = {"type": "function", "function": {"name": "get_order", "parameters": SCHEMA}}
PUT: dict[str, Any] = {"type": "function", "function": {"name": "put", "description": "Puts."}}
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "get_order", "arguments": '{"n": 1}'}}


def chat(**fields: Any) -> Ask:
    return read(json.dumps({"messages": HELLO, **fields}).encode(), chat=True)


def asked(message: dict[str, Any]) -> Any:
    return chat(messages=[*HELLO, message]).messages[1]


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**GET["function"], **changes}}


def test_tools_and_choices() -> None:
    names = [one["name"] for one in chat(tools=[GET, PUT]).offer.functions]
    assert names == ["get_order", "put"]
    assert chat(tools=[GET]).offer.tools == (GET,)
    for choice, must in (
        (None, []),
        ("auto", []),
        ("required", ["get_order", "put"]),
        ({"type": "function", "function": {"name": "put"}}, ["put"]),
    ):
        ask = chat(tools=[GET, PUT], tool_choice=choice)
        assert [one["name"] for one in ask.offer.must] == must
        assert ask.held == bool(must)
        assert ask.offer.several == (not isinstance(choice, dict))
    assert not chat(tools=[GET], parallel_tool_calls=False).offer.several
    # Nobody is offered what must not be called.
    assert chat(tools=[GET], tool_choice="none").offer.tools == ()
    assert not chat(tools=[], tool_choice="auto", parallel_tool_calls=True, response_format={"type": "text"}).held


def test_formats_of_answers() -> None:
    assert chat(response_format={"type": "text"}).schema is None
    assert chat(response_format={"type": "json_object"}).schema == ANY_OBJECT
    inner = {"name": "order", "strict": True, "schema": SCHEMA}
    assert chat(response_format={"type": "json_schema", "json_schema": inner}).schema == SCHEMA
    assert chat(tools=[GET], tool_choice="none", response_format={"type": "json_object"}).held


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": {}}, "tools", "a list of at most"),
        ({"tools": [function(name=f"f{n}") for n in range(MOST_TOOLS + 1)]}, "tools", "a list of at most 128"),
        ({"tools": [GET, "x"]}, "tools[1]", "an object"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function"),
        ({"tools": [{"function": GET["function"]}]}, "tools[0].type", "must be function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "an object"),
        ({"tools": [function(name="")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": [GET, GET]}, "tools[1].function.name", "another tool is called get_order"),
        ({"tools": [function(description=3)]}, "tools[0].function.description", "text"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "JSON schema"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type", "must be object"),
        ({"tools": [function(paramters={})]}, "tools[0].function.paramters", "no such field. Fix: parameters"),
        ({"tools": [GET], "tool_choice": "must"}, "tool_choice", "none, auto, required"),
        ({"tools": [GET], "tool_choice": ["auto"]}, "tool_choice", "none, auto, required"),
        ({"tools": [GET], "tool_choice": {"type": "function"}}, "tool_choice", "function"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            {"tools": [GET], "tool_choice": {"type": "function", "function": {"name": "get_ordr"}}},
            "tool_choice.function.name",
            "Fix: get_order",
        ),
        ({"tools": [GET], "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"response_format": "json"}, "response_format", "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "JSON schema",
        ),
        ({"response_format": {"type": "json_object"}, "tools": [GET]}, "response_format", "with tools"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "has an end"),
        ({"tools": [GET], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "has an end"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert "{" not in str(refused.value).partition(": ")[0]


def test_calls_and_results_in_messages() -> None:
    # As the API answers: no content, and arguments as text.
    found = asked({"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None})
    assert found["content"] == ""
    assert found["tool_calls"][0] == {**CALL, "function": {"name": "get_order", "arguments": {"n": 1}}}
    assert "refusal" not in found
    assert asked({"role": "assistant"})["content"] == ""
    result = {"role": "tool", "tool_call_id": "a", "name": "get_order", "content": "here"}
    assert asked(result) == result
    bare = {"name": "get_order", "arguments": {"n": None}}
    assert asked({"role": "assistant", "content": "x", "tool_calls": [bare]})["tool_calls"] == [bare]


@pytest.mark.parametrize(
    ("message", "param", "reason"),
    [
        ({"role": "user", "content": None}, "content", "must be text"),
        ({"role": "tool", "tool_call_id": 3, "content": "x"}, "tool_call_id", "must be text"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls", "a list of calls"),
        ({"role": "assistant", "tool_calls": ["get"]}, "tool_calls[0]", "must be an object"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0].function.name", "no name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "tool_calls[0].function.arguments",
            "not JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "tool_calls[0].function.arguments",
            "must be an object",
        ),
    ],
)
def test_messages_that_are_refused(message: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        asked(message)
    assert refused.value.param == f"messages[1].{param}"
