"""Sizes before tokenising, and the thread that tokenises."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from surogate_command_serve.asks import Ask, RequestError
from surogate_command_serve.preparing import Preparer, check_sizes, longest_token
from surogate_command_serve.tool_fields import Offer
from transformers import AutoTokenizer


class Panic(BaseException):
    """Like the panics of a tokenizer, which are no `Exception`."""


@pytest.fixture
def model(hf_dir: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    return SimpleNamespace(tokenizer=tokenizer, context=16, prepared=SimpleNamespace(context=256))


def test_what_cannot_fit_is_refused_by_its_size(model: Any) -> None:
    most = 16 * longest_token(model.tokenizer)
    message = {"role": "user", "content": "a"}
    parts = ({"role": "user", "content": [{"type": "text", "text": "é" * (most // 2 + 1)}]},)
    for ask, param in [
        (Ask(chat=False, model="a", prompts=("a", "é" * (most // 2 + 1))), "prompt"),
        (Ask(chat=False, model="a", prompts=((1,) * 16,)), "prompt"),
        (Ask(chat=True, model="a", messages=({"role": "user", "content": "a" * (most + 1)},)), "messages"),
        (Ask(chat=True, model="a", messages=parts), "messages"),
        (Ask(chat=True, model="a", messages=(message,) * 17), "messages"),
        (Ask(chat=True, model="a", messages=({**message, "tool_calls": [{"a" * (most + 1): 1}]},)), "messages"),
        (Ask(chat=True, model="a", offer=Offer(tools=({"enum": list(range(most))},))), "tools"),
    ]:
        with pytest.raises(RequestError, match=r"there is room for 16 tokens .* larger --context\.$") as refused:
            check_sizes(model, ask)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
    check_sizes(model, Ask(chat=False, model="a", prompts=("a" * most, (1,) * 15)))
    check_sizes(model, Ask(chat=True, model="a", messages=(message,) * 15))


def test_no_token_is_longer_than_the_longest(model: Any) -> None:
    size = longest_token(model.tokenizer)
    words = [model.tokenizer.decode([token]) for token in range(len(model.tokenizer))]
    assert max(len(word.encode()) for word in words if "\ufffd" not in word) <= size


def test_the_smallest_is_prepared_first() -> None:
    preparer, go = Preparer(), threading.Event()
    order: list[int] = []

    async def run() -> None:
        first = asyncio.ensure_future(preparer.call(1, partial(go.wait, 10)))
        await asyncio.sleep(0.05)
        calls = [asyncio.ensure_future(preparer.call(n, partial(order.append, n))) for n in (9000, 10, 8500, 20_000)]
        gone = asyncio.ensure_future(preparer.call(5, partial(order.append, 5)))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(first, *calls)

    asyncio.run(run())
    assert order == [10, 9000, 8500, 20_000]
    preparer.close()


def test_a_panic_is_an_error_of_one_request() -> None:
    preparer = Preparer()

    def fail() -> None:
        raise Panic("regex")

    async def run() -> int:
        with pytest.raises(Panic):
            await preparer.call(1, fail)
        return await preparer.call(1, lambda: 7)

    assert asyncio.run(run()) == 7
    preparer.close()


def test_a_client_that_is_gone_leaves_no_body_behind() -> None:
    preparer, go = Preparer(), threading.Event()

    class Body:
        """A body that somebody may still hold."""

        def read(self) -> None:
            """Nothing."""

    async def run() -> bool:
        first = asyncio.ensure_future(preparer.call(1, go.wait))
        body = Body()
        held = ref(body)
        gone = asyncio.ensure_future(preparer.call(9000, body.read))
        del body
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.wait([gone])
        del gone
        gc.collect()
        kept = held() is not None
        go.set()
        await first
        return kept

    assert not asyncio.run(run())
    preparer.close()
