"""The completions of a request as they grow: log-probabilities, whole and in parts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from surogate_command_serve.answers import Answer, Usage
from surogate_command_serve.asks import Ask
from surogate_command_serve.models import ServedModel
from surogate_command_serve.parts import TicketParts
from surogate_command_serve.worker import Chosen, Ticket
from transformers import AutoTokenizer

from surogate_core.plugin import bundles, inference
from surogate_core.service.inference import token_bytes


@pytest.fixture(scope="module")
def tokenizer(hf_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(hf_dir)


def answers(tokenizer: Any, ids: list[int], ask: Ask) -> tuple[Any, list[Any]]:
    """(the whole choice, those of a stream) of a completion with these tokens."""
    model: Any = SimpleNamespace(tokenizer=tokenizer, echo=lambda ask, request: "", reader=lambda ask: None)
    model.watch, model.token = partial(ServedModel.watch, model), partial(ServedModel.token, model)
    request = bundles.Request(prompt=(40,), max_new_tokens=len(ids))
    for stream in (False, True):
        ask = replace(ask, stream=stream)
        parts = TicketParts(ask, model, Ticket(model="a", requests=[request], watches=[]))
        answer = Answer(chat=ask.chat, model="a")
        watch, chunks = inference.GrowingText(tokenizer, (40,), ask.stop), []
        for count, token in enumerate(ids, start=1):
            stopped = watch.take(token)
            reason: Any = "stop" if stopped else "length" if count == len(ids) else None
            parts.take(Chosen(place=0, token=token, logprob=-float(count), reason=reason))
            chunks += [answer.chunk(choice)["choices"][0] for choice in parts.new()] if stream else []
            if stopped:
                break
        if not stream:
            usage = Usage(prompt=1, completion=len(ids))
            (whole,) = answer.whole(parts.whole(), usage)["choices"]
    return whole, chunks


def pieces(tokenizer: Any, text: str) -> list[int]:
    """One token a byte."""
    table = token_bytes(tokenizer)
    single = {table.inside(token): token for token in range(len(tokenizer)) if len(table.inside(token)) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("stop", [(), ("Cxy",), ("C", "zz")])
def test_offsets_point_into_the_text(tokenizer: Any, stop: tuple[str, ...]) -> None:
    ids = [*pieces(tokenizer, "🙂A"), tokenizer.eos_token_id, *pieces(tokenizer, "BCxé")]
    whole, stream = answers(tokenizer, ids, Ask(chat=False, model="a", logprobs=True, stop=stop))
    ended = "C" in stop
    assert whole["text"] == ("🙂AB" if ended else "🙂ABCxé")
    offsets = [0, 0, 0, 0, 1, 2, 2, 3, *(() if ended else (4, 5, 5))]
    assert whole["logprobs"]["text_offset"] == offsets
    assert "".join(choice["text"] for choice in stream) == whole["text"]
    parts = [choice["logprobs"] for choice in stream]
    for name in ("text_offset", "tokens", "token_logprobs"):
        assert [value for part in parts for value in part[name]] == whole["logprobs"][name], name
    given = ""
    for choice in stream:
        given += choice["text"]
        assert all(offset <= len(given) for offset in choice["logprobs"]["text_offset"])


def test_a_stop_text_that_is_seen_late_leaves_no_offset_behind_the_text(tokenizer: Any) -> None:
    ask = Ask(chat=False, model="a", logprobs=True, stop=("BCD",))
    whole, stream = answers(tokenizer, pieces(tokenizer, "ABCDE"), ask)
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("A", [0, 1, 1, 1])
    assert [offset for choice in stream for offset in choice["logprobs"]["text_offset"]] == [0, 1, 1, 1]


def test_chats_have_the_bytes_of_parts_of_characters(tokenizer: Any) -> None:
    ids = [*pieces(tokenizer, "🙂"), tokenizer.eos_token_id]
    whole, stream = answers(tokenizer, ids, Ask(chat=True, model="a", logprobs=True))
    content = whole["logprobs"]["content"]
    assert [one["bytes"] for one in content[:4]] == [[byte] for byte in "🙂".encode()]
    assert bytes(content[4]["bytes"]).decode() == content[4]["token"] == tokenizer.eos_token
    assert [one for choice in stream for one in choice["logprobs"]["content"]] == content
