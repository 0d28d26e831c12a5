"""Bodies of requests: what is taken, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from surogate_command_serve.asks import MOST_STOPS, RequestError, read

HELLO = [{"role": "user", "content": "Hello"}]


def completion(**fields: Any) -> Any:
    return read(json.dumps({"prompt": "a", **fields}).encode(), chat=False)


def chat(**fields: Any) -> Any:
    return read(json.dumps({"messages": HELLO, **fields}).encode(), chat=True)


def test_fields() -> None:
    ask = completion(
        model="shop", n=3, max_tokens=7, stop=["a", "b"], temperature=0, top_k=-1, seed=5, logprobs=0, stream=True
    )
    assert (ask.model, ask.n, ask.max_tokens, ask.stop, ask.stream) == ("shop", 3, 7, ("a", "b"), True)
    assert ask.sampling == {"temperature": 0, "top_k": 0, "seed": 5}
    assert ask.logprobs
    assert not completion(logprobs=None, temperature=None).logprobs
    assert chat(logprobs=True, max_completion_tokens=9, max_tokens=3).max_tokens == 9
    assert chat(stream=True, stream_options={"include_usage": True}).usage
    assert not chat(logprobs=False).logprobs
    for prompt, prompts in (
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ):
        assert completion(prompt=prompt).prompts == prompts


def test_fields_that_ask_for_nothing_are_taken() -> None:
    neutral = {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "user": "me"}
    assert completion(**neutral, suffix=None, best_of=1).n == 1
    assert chat(**neutral, tools=[], tool_choice="auto", response_format={"type": "text"}, top_logprobs=0).n == 1


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "there is no such field. Fix: temperature"),
        ({"temperature": "warm"}, "temperature", "a number from 0 to 100"),
        ({"temperature": -1}, "temperature", "a number from 0 to 100"),
        ({"temperature": True}, "temperature", "a number"),
        ({"temperature": float("nan")}, "temperature", "a number"),
        ({"top_p": -0.1}, "top_p", "a number from 0 to 1"),
        ({"top_k": 1.5}, "top_k", "a whole number"),
        ({"seed": 2**70}, "seed", "a whole number"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 128, "prompt": ["a"] * 9}, "n", "at most 1024 completions"),
        ({"temperature": 10**400}, "temperature", "from 0 to 100"),
        ({"temperature": float("nan")}, "temperature", "from 0 to 100"),
        ({"min_p": float("inf")}, "min_p", "from 0 to 1"),
        ({"best_of": 2}, "best_of", "not offered"),
        ({"max_tokens": 0}, "max_tokens", "from 1"),
        ({"stop": ""}, "stop", "none empty"),
        ({"stop": ["a"] * (MOST_STOPS + 1)}, "stop", "at most"),
        ({"stop": ["a", "b" * 1001]}, "stop", "more than 1,000 characters"),
        ({"logprobs": 5}, "logprobs", "Fix: logprobs: 0"),
        ({"logprobs": 1}, "logprobs", "Fix: logprobs: 0"),
        ({"logprobs": 0, "echo": True}, "echo", "not offered"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not offered. Fix: use repetition_penalty"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": []}, "stream_options", "an object"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "Fix: include_usage"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"tools": []}, "tools", "no such field. Fix: send it to /v1/chat/completions"),
        ({"response_format": {"type": "text"}}, "response_format", "send it to /v1/chat/completions"),
        ({"model": 3}, "model", "text"),
        ({"messages": HELLO}, "messages", "no such field. Fix: send it to /v1/chat/completions"),
        ({"prompt": []}, "prompt", "a list of token ids"),
        ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
        ({"prompt": [True]}, "prompt", "a list of token ids"),
        ({"prompt": [[]]}, "prompt", "a list of token ids"),
    ],
)
def test_what_a_completion_refuses(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        completion(**fields)
    assert refused.value.status == 400
    error = refused.value.body()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"prompt": "x"}, "prompt", "no such field. Fix: send it to /v1/completions"),
        ({"messages": ["Hello"]}, "messages[0]", '"role" and "content"'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "image_url",
        ),
        ({"functions": [{"name": "f"}]}, "functions", "not offered. Fix: use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "not offered. Fix: use tool_choice"),
        ({"top_logprobs": 5}, "top_logprobs", "not offered"),
        ({"logprobs": 3}, "logprobs", "true or false"),
    ],
)
def test_what_a_chat_refuses(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        chat(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number of 5,000 digits"),
        (b'{"prompt": [-' + b"9" * 1_000_000 + b"]}", "a number of 1,000,001 digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_bodies_that_are_no_requests(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(body, chat=False)
