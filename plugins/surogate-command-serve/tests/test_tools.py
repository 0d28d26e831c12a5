"""Tool calls and constrained answers of the server, over a tiny model with random weights."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from surogate_command_serve.models import ServedModel
from surogate_command_serve.server import Server
from surogate_command_serve.worker import Worker

from surogate_core.plugin import bundles, inference, load_plugins, load_run_config
from surogate_core.service.inference import named, prepare
from surogate_testing.chat_templates import template_text
from surogate_testing.pretrained import write_model

TOKEN = "a-token-of-the-test"
HELLO = [{"role": "user", "content": "Hello"}]
CONTEXT = 512
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "stop"}},
]
PAINT = {"type": "function", "function": {"name": "paint"}}


def validate(instance: Any, schema: Any) -> None:
    """jsonschema's, whose import takes 2 s."""
    import jsonschema

    jsonschema.validate(instance, schema)


class Live:
    """A running server."""

    def __init__(self, server: Server):
        self.server = server

    def post(self, body: Any, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
        """(status, body) of a request with the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def ask(self, **body: Any) -> Any:
        """The answer to a chat."""
        status, found = self.post({"messages": HELLO, **body})
        assert status == 200, found
        return json.loads(found)

    def stream(self, **body: Any) -> list[Any]:
        """The events of a chat."""
        status, found = self.post({"messages": HELLO, **body, "stream": True})
        assert status == 200, found
        *events, end = [line for line in found.decode().split("\n\n") if line]
        assert end == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def refused(self, **body: Any) -> Any:
        """The error of a chat."""
        status, found = self.post({"messages": HELLO, **body})
        assert status == 400, found
        return json.loads(found)["error"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, inference.NativeEngine]:
    directory = write_model(tmp_path_factory.mktemp("tools") / "model", max_position_embeddings=CONTEXT)
    (directory / "chat_template.jinja").write_text(template_text("qwen3"))
    registry, found = load_plugins(), named(str(directory))
    prepared = prepare(found, load_run_config([*found.overrides, "device=cpu"], registry=registry), registry)
    engine = inference.NativeEngine(
        prepared.load(registry), bundles.RolloutSettings(slots=4, context=CONTEXT, frozen=True)
    )
    return ServedModel(name="tiny", prepared=prepared, sampling=prepared.sampling, context=CONTEXT), engine


@pytest.fixture(scope="module")
def live(served: tuple[ServedModel, inference.NativeEngine]) -> Iterator[Live]:
    server = Server({"tiny": served[0]}, Worker(served[1], slots=4), token=TOKEN)
    yield Live(server)
    server.close()


def call_of(choice: Any) -> tuple[str, Any]:
    """(name, arguments) of the only call of an answer."""
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert len(call["id"]) == 9
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def test_a_named_tool_is_called_once_and_its_arguments_validate(live: Live) -> None:
    for seed in range(2):
        (choice,) = live.ask(tools=TOOLS, tool_choice=PAINT, temperature=1.5, seed=seed)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        name, arguments = call_of(choice)
        assert name == "paint"
        validate(arguments, COLOUR)


def test_a_stop_text_that_cuts_a_call_is_the_reason(live: Live) -> None:
    body = {"tools": TOOLS, "tool_choice": PAINT, "stop": "colour"}
    (choice,) = live.ask(**body)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "paint", "arguments": '{"'}
    assert live.stream(**body)[-1]["choices"][0]["finish_reason"] == "stop"


def test_half_of_a_surrogate_pair_in_arguments_is_refused(live: Live) -> None:
    call = {"type": "function", "function": {"name": "paint", "arguments": r'{"a": "\ud800"}'}}
    error = live.refused(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO])
    assert "half a surrogate pair" in error["message"]


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_values_at_any_depth_get_an_answer(live: Live, depth: int) -> None:
    deep = json.loads("[" * depth + "]" * depth)
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"a": deep}}}]}
    as_text = {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": json.dumps({"a": deep})}}]}
    for body in (
        {"messages": [*HELLO, called, *HELLO]},
        {"messages": [*HELLO, as_text, *HELLO]},
        {"messages": [{**HELLO[0], "other": deep}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"default": deep}}}]},
    ):
        status, found = live.post({"messages": HELLO, "max_tokens": 1, **body})
        assert status in (200, 400), found
        assert status == 200 or depth > 100, found


def test_a_required_call_is_one_of_the_tools(live: Live) -> None:
    seen = set()
    for seed in range(3):
        body = {"tools": TOOLS, "tool_choice": "required", "temperature": 2.0, "seed": seed}
        (choice,) = live.ask(**body, parallel_tool_calls=False)["choices"]
        name, arguments = call_of(choice)
        seen.add(name)
        validate(arguments, COLOUR if name == "paint" else {"maxProperties": 0})
        (several,) = live.ask(**body, max_tokens=200)["choices"]
        assert several["message"]["tool_calls"]
        assert several["finish_reason"] in ("tool_calls", "length")
    assert seen == {"paint", "stop"}


def test_a_call_is_streamed_name_first_then_its_arguments(live: Live) -> None:
    body = {"tools": TOOLS, "tool_choice": PAINT, "temperature": 1.5, "seed": 3}
    name, arguments = call_of(live.ask(**body)["choices"][0])
    events = live.stream(**body, stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0].keys() == {"index", "id", "type", "function"}
    assert calls[0]["function"] == {"name": name, "arguments": ""}
    assert len(calls) > 2  # a constrained call cannot fail, so its arguments need not wait for their end
    assert all(call["index"] == 0 and call.keys() == {"index", "function"} for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == arguments
    assert not any(delta.get("content") for delta in deltas)
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "tool_calls"
    assert events[-1]["usage"]["completion_tokens"] > 5


def test_answers_validate_against_their_schema(live: Live) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["order", "return"]},
            "items": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
            },
            "note": {"type": ["string", "null"], "maxLength": 5},
        },
        "required": ["kind", "items", "note"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": schema, "strict": True}}
    for seed in range(2):
        body = {"response_format": form, "temperature": 1.5, "seed": seed}
        (choice,) = live.ask(**body)["choices"]
        assert choice["finish_reason"] == "stop"
        validate(json.loads(choice["message"]["content"]), schema)
        events = live.stream(**body)
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == choice["message"]["content"]
    (cut,) = live.ask(response_format=form, max_tokens=3, seed=1, temperature=1.5)["choices"]
    assert cut["finish_reason"] == "length"
    content = live.ask(response_format={"type": "json_object"}, max_tokens=60)["choices"][0]["message"]["content"]
    assert content.startswith("{")


def test_free_requests_beside_constrained_ones_have_the_bits_that_they_have_alone(live: Live) -> None:
    free = [{"max_tokens": 24, "temperature": 1.2, "seed": seed, "logprobs": True} for seed in range(5)]
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    held: list[dict[str, Any]] = [{"response_format": form, "seed": seed, "temperature": 1.2} for seed in range(3)]
    held += [{"tools": TOOLS, "tool_choice": "required", "seed": 7, "temperature": 1.2, "max_tokens": 90}]
    bodies = [body for pair in zip(free, [*held, {}], strict=True) for body in pair if body]
    alone = [live.ask(**body)["choices"] for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: live.ask(**body)["choices"], bodies))
    for found in (alone, together):  # ids of calls are random
        for choices in found:
            for call in choices[0]["message"].get("tool_calls", ()):
                call["id"] = ""
    assert together == alone


def test_log_probabilities_of_a_constrained_answer_are_those_of_the_model(live: Live, served: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    (choice,) = live.ask(response_format=form, logprobs=True, temperature=1.5, seed=2)["choices"]
    values = [one["logprob"] for one in choice["logprobs"]["content"]]
    # A mask that forbids nearly all tokens would make these nearly 0.
    assert sum(values) / len(values) < -3


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objct"}, "Invalid type"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.com/a.json"}, "not present"),
        ({"enum": []}, "empty"),
        ({"type": "object", "title": "a" * 70_000}, "too long"),
        (json.loads('{"items":' * 70 + "{}" + "}" * 70), "nested too deeply"),
    ],
)
def test_schemas_that_cannot_be_held_to_are_refused(live: Live, schema: Any, reason: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    error = live.refused(response_format=form)
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format: ")
    assert reason in error["message"]


def test_tools_whose_arguments_cannot_be_held_to_are_refused(live: Live) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "objct"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    error = live.refused(tools=[tool], tool_choice="required")
    assert error["param"] == "tools"
    assert "Invalid type" in error["message"]


def test_a_schema_that_becomes_too_complex_ends_its_own_answer_only(live: Live) -> None:
    names = [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(700)]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": names}}}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(live.ask, max_tokens=40, temperature=1.2, seed=1)
        error = live.refused(response_format=form, max_tokens=40)
        assert error["param"] == "response_format"
        assert "\n" not in error["message"]
        assert other.result()["choices"][0]["message"]["content"]


def test_text_that_is_no_call_stays_content(live: Live) -> None:
    """Random weights call nothing; with tools the answer's text is that of the same prompt without a parser."""
    (choice,) = live.ask(tools=TOOLS, max_tokens=30, temperature=1.5, seed=1)["choices"]
    assert choice["message"].keys() == {"role", "content"}
    assert choice["finish_reason"] == "length"
    deltas = [e["choices"][0]["delta"] for e in live.stream(tools=TOOLS, max_tokens=30, temperature=1.5, seed=1)]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]


def test_a_template_without_calls_and_an_engine_without_grammars_are_named(served: Any) -> None:
    from surogate_command_serve.asks import RequestError, read

    model = served[0]
    ask = read(json.dumps({"messages": HELLO, "response_format": {"type": "json_object"}}).encode(), chat=True)
    with pytest.raises(RequestError, match="--engine native") as refused:
        replace(model, constrains=False).ticket(ask)
    assert refused.value.param == "response_format"
    ask = read(json.dumps({"messages": HELLO, "tools": TOOLS}).encode(), chat=True)
    with pytest.raises(RequestError, match="no such parser") as refused:
        replace(model, tool_parser="herms").ticket(ask)
    tokenizer = model.tokenizer
    own = tokenizer.chat_template
    try:
        tokenizer.chat_template = template_text("gemma")
        with pytest.raises(RequestError, match="takes no tools"):
            model.ticket(ask)
        said = "{% for message in messages %}{{ message.content }}{% endfor %}"
        for template in (said, "{% if xml_tools is defined %}{{ xml_tools }}{% endif %}" + said):
            tokenizer.chat_template = template
            with pytest.raises(RequestError, match="lists no tools"):
                model.ticket(ask)
    finally:
        tokenizer.chat_template = own
