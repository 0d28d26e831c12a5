"""Templates that mean gigabytes or hours are refused at the row, and long conversations are not."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.data.encoded import RowError
from surogate_core.data.text.bounds import MAX_ITEMS
from surogate_core.data.text.chat import chat_of
from surogate_core.data.text.tokenizer import load_tokenizer

CHATML = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("pkg://surogate_dataset_chat/embedded/tokenizer")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{{ 'a' * 10**9 }}", "repeats a value"),
        ("{{ 10**9 * 'a' }}", "repeats a value"),
        ("{% set x = [0] * 10**9 %}", "repeats a value"),
        ("{{ 10**(10**8) }}", "power that is too large"),
        ("{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "too large"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
            "ranges have",
        ),
        ("{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "writes 9,999,"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    ],
)
def test_an_explosion_is_an_error_of_the_row(line: str, reason: str, tokenizer: Any) -> None:
    tokenizer.chat_template = line + CHATML
    for _ in range(2):
        with pytest.raises(RowError, match=rf"the chat template refuses the conversation: .*{reason}"):
            chat_of(tokenizer).render(MESSAGES)


def test_what_a_template_raises_is_shown_with_escapes_and_cut(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('\x1b[31m' ~ 'x' * 9000) }}"
    with pytest.raises(RowError) as error:
        chat_of(tokenizer).render(MESSAGES)
    assert r"\x1b[31mxx" in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


def test_what_templates_do_is_within_the_bounds(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ '-' * 9 }}{{ 2**10 }}{% for i in range(99) %}{{ 3 * i }}{% endfor %}\n" + CHATML
    chat = chat_of(tokenizer)
    long = [{"role": "user", "content": "word " * MAX_ITEMS}, MESSAGES[1]]
    assert len(chat.render(long)) > 5 * MAX_ITEMS
    # The steps are counted anew at each rendering.
    texts = {chat.render(MESSAGES) for _ in range(300)}
    assert len(texts) == 1
    assert texts.pop().startswith("---------1024036")
