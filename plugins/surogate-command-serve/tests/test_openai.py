"""The package `openai` as a client of the server, if it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from surogate_command_serve.serving import serve

openai = pytest.importorskip("openai")
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(hf_dir: Path) -> Iterator[Any]:
    with serve(hf_dir, name="tiny", device="cpu") as server:
        yield openai.OpenAI(base_url=server.url, api_key=server.token, max_retries=0)


def test_chats(client: Any) -> None:
    values = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 1.0, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**values, logprobs=True)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert all(choice.logprobs.content for choice in whole.choices)
    parts = {0: "", 1: ""}
    with client.chat.completions.create(**values, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                parts[choice.index] += choice.delta.content or ""
            usage = chunk.usage
    assert parts == texts
    assert usage == whole.usage


def test_completions(client: Any) -> None:
    values = {"model": "tiny", "prompt": ["The chain", "A wheel"], "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**values, logprobs=0)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].logprobs.tokens
    parts = ["", ""]
    for chunk in client.completions.create(**values, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [choice.text for choice in whole.choices]
    extra = {"top_k": 1, "ignore_eos": True}
    assert (
        client.completions.create(model="tiny", prompt="a", max_tokens=5, extra_body=extra).usage.completion_tokens == 5
    )


def test_models_and_errors(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match=r"there is no such model\. Fix: tiny"):
        client.completions.create(model="none", prompt="a")
    with pytest.raises(openai.BadRequestError, match="at least one message"):
        client.chat.completions.create(model="tiny", messages=[])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
