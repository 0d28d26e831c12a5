"""The date in chat templates: one for all rows of a run, in the key of their tokens and in the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from surogate_core.bundles import DatasetFormat
from surogate_core.data import encoding
from surogate_core.data.encoded import RowError
from surogate_core.data.pipeline import prepare
from surogate_core.data.sampler import StepLoader
from surogate_core.data.text import clock
from surogate_core.data.text.chat import chat_of
from surogate_core.data.text.labels import tokenize_conversation
from surogate_core.errors import UserError
from surogate_testing.chat_templates import CHATML, byte_tokenizer

TURNS = [{"role": "user", "content": "Ask."}, {"role": "assistant", "content": "Ok."}]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = clock._Clock.day
    clock._Clock.follows = False  # a server that ran before lets it follow
    yield
    clock._Clock.day, clock._Clock.follows = before, False


def dated(form: str) -> Any:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = (
        "{{- '<|im_start|>system\\nNow ' + strftime_now('" + form + "') + '<|im_end|>\\n' }}" + CHATML
    )
    return tokenizer


@pytest.mark.parametrize("form", ["%d %b %Y", "%d %b %Y %H:%M:%S.%f"])
def test_two_renderings_have_the_same_time(form: str) -> None:
    tokenizer = dated(form)
    clock.set_day(date(2031, 2, 3))
    document = tokenize_conversation(tokenizer, TURNS)
    assert tokenizer.decode(document.input_ids[document.labels >= 0]) == "Ok.<|im_end|>"
    assert "Now 03 Feb 2031" in tokenizer.decode(document.input_ids)


def test_the_day_stays_unless_it_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock._Clock.day = None
    days = iter((date(2031, 2, 3), date(2031, 2, 4)))

    class Days(date):
        @classmethod
        def today(cls) -> Any:
            return next(days)

    monkeypatch.setattr(clock, "date", Days)
    assert clock.today() == clock.today() == date(2031, 2, 3)
    clock.follow()
    assert clock.today() == date(2031, 2, 4)


def test_a_worker_has_the_day_of_its_run(words: DatasetFormat) -> None:
    clock.set_day(date(2031, 2, 3))
    encoder = encoding.RowEncoder(format=words, options=None, context=None)  # type: ignore[arg-type]
    clock.set_day(date(2032, 1, 1))
    before = encoding._encoder
    try:
        encoding._start(encoder)
    finally:
        encoding._encoder = before
    assert clock.today() == date(2031, 2, 3)


def test_the_date_is_in_the_key_and_in_the_state(
    make_config: Callable[..., Any], write_rows: Callable[..., Path], formats: Any, make_tokenizer: Any
) -> None:
    config = make_config(write_rows([{"text": "w3 w4 w5"}] * 4))

    def prepared(template: str | None, day: date) -> tuple[bool, str | None]:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        clock.set_day(day)
        data = prepare(config, tokenizer, formats)
        state = StepLoader(data.train, rows_per_micro_batch=1, micro_batches=1, seed=1, day=data.day).state()
        return data.report.datasets[0].cached, state.get("day")

    first, second = date(2031, 2, 3), date(2031, 2, 4)
    assert prepared(None, first) == (False, None)
    assert prepared(None, second) == (True, None)
    template = "{{ strftime_now('%d') }}" + CHATML
    assert prepared(template, first) == (False, "2031-02-03")
    assert prepared(template, first) == (True, "2031-02-03")
    assert prepared(template, second) == (False, "2031-02-04")
    clock.resume({"day": "2031-02-03"})
    assert clock.today() == first
    clock.resume({})
    assert clock.today() == first


@pytest.mark.parametrize(
    "text", ["{{ ['a', 'b'] | random }}", "{{ lipsum() }}", "{{ messages | map('list') | random }}"]
)
def test_a_template_that_draws_is_refused(text: str) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = text + CHATML
    with pytest.raises(RowError, match="draws at random"):
        tokenize_conversation(tokenizer, TURNS)


def test_a_template_that_writes_an_address_is_refused() -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = "{{ messages | map(attribute='role') }}" + CHATML
    with pytest.raises(UserError, match=r"writes an address of memory\. Fix: "):
        chat_of(tokenizer)
