"""Documents as text with their label mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surogate_core.data.pipeline import prepare
from surogate_core.data.preview import (
    PackedDocument,
    first_and_last,
    packed_documents,
    plain,
    segments,
    suspicious_examples,
    visible,
)
from surogate_core.data.shards import Row


def document(ids: list[int], trained: list[int], weights: list[float] | None = None) -> PackedDocument:
    return PackedDocument(
        row=0,
        number=1,
        documents=1,
        input_ids=np.array(ids, np.int32),
        weights=np.array(weights if weights is not None else trained, np.float32),
    )


@pytest.fixture(scope="module")
def chat() -> Any:
    from surogate_testing import chat_templates

    return chat_templates.templated("own")[0]


def test_trained_spans_special_tokens_and_spaces_are_marked(chat: Any) -> None:
    ids = chat("<|im_start|>user\nhi<|im_end|> yes  no\t<|im_end|>", add_special_tokens=False)["input_ids"]
    end = ids.index(chat.convert_tokens_to_ids("<|im_end|>")) + 1
    shown = plain(segments(document(ids, [i >= end for i in range(len(ids))]), chat))
    assert shown == "«<|im_start|>»user↵\nhi«<|im_end|>»⟦·yes··no⇥«<|im_end|>»⟧"


def test_weights_are_shown_where_they_are_not_one(chat: Any) -> None:
    ids = chat("one two three four", add_special_tokens=False)["input_ids"]
    quarter = len(ids) // 4
    weights = [0.0] * quarter + [0.5] * quarter + [1.0] * (len(ids) - 2 * quarter)
    shown = plain(segments(document(ids, [w > 0 for w in weights], weights), chat))
    assert shown.count("⟦×0.5 ") == 1
    assert "⟧⟦" in shown
    assert shown.endswith("⟧")


@given(text=st.text(max_size=60), cuts=st.lists(st.booleans(), min_size=300, max_size=300))
def test_every_character_is_shown_whatever_is_trained(chat: Any, text: str, cuts: list[bool]) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = chat(f"a{text}", add_special_tokens=False)["input_ids"]
    whole = segments(document(ids, [False] * len(ids)), chat)
    assert "".join(s.text for s in whole) == chat.decode(ids, clean_up_tokenization_spaces=False)
    shown = plain(segments(document(ids, cuts[: len(ids)]), chat))
    assert shown.count("⟦") == shown.count("⟧")
    assert all(c.isprintable() or c == "\n" for c in shown)
    shown.encode("utf-8")


def test_a_character_of_several_tokens_is_one_part(chat: Any) -> None:
    ids = chat("🦊", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    assert [s.parts for s in segments(document(ids, [False] * len(ids)), chat)] == [("🦊",)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        (" a ", "·a·"),
        ("a  b", "a··b"),
        ("a \nb", "a·↵\nb"),
        ("\x1b[31m", "\\x1b[31m"),
        ("⟦x⟧", "\\u27e6x\\u27e7"),
        ("\ud800", "\\ud800"),
        ("a\u00a0b\r", "a\\xa0b\\r"),
        ("é你🦊", "é你🦊"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_the_middle_of_a_long_document_is_left_out(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    ids = [3 + i % 90 for i in range(1000)]
    parts = segments(document(ids, [i >= 500 for i in range(1000)]), tokenizer, limit=10)
    assert [p.kind for p in parts] == ["token", "gap", "token"]
    assert parts[1].text == "… 990 tokens left out, 495 of them trained …"
    assert len(parts[0].parts) == len(parts[2].parts) == 5


def test_first_and_last_trained_token(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    assert first_and_last(document([3, 4, 5, 6], [0, 1, 1, 0]), tokenizer) == (
        "first trained '·w4' (#1), last trained '·w5' (#2)"
    )
    assert first_and_last(document([3], [0]), tokenizer) == "none trained"


def test_documents_of_rows_in_order() -> None:
    class Rows:
        def __len__(self) -> int:
            return 2

        def row(self, index: int) -> Row:
            ids = np.arange(5, dtype=np.int32) + 10 * index
            return Row(input_ids=ids, weights=np.array([1, 1, 1, 0, 0.5], np.float32), lengths=(2, 3))

    found = list(packed_documents(Rows()))  # type: ignore[arg-type]
    assert [(d.row, d.number, d.documents) for d in found] == [(0, 1, 2), (0, 2, 2), (1, 1, 2), (1, 2, 2)]
    assert [d.input_ids.tolist() for d in found] == [[0, 1], [2, 3, 4], [10, 11], [12, 13, 14]]
    # The first token of a document is predicted by nothing.
    assert [d.trained.tolist() for d in found[:2]] == [[False, True], [False, False, True]]
    assert [d.weights.tolist() for d in found[:2]] == [[0, 1], [0, 0, 0.5]]


@pytest.mark.parametrize(("prompt_words", "what"), [(0, "everything"), (999, "almost nothing"), (200, None)])
def test_an_example_of_data_in_which_all_or_nothing_is_trained(
    prompt_words: int,
    what: str | None,
    write_rows: Callable[..., Any],
    make_config: Callable[..., Any],
    tokenizer: Any,
    formats: Any,
) -> None:
    path = write_rows([{"text": " ".join(f"w{3 + i % 90}" for i in range(1000))}] * 3)
    config = make_config(path, entry={"prompt_words": prompt_words}, sequence_len=2048)
    data = prepare(config, tokenizer, formats)
    found = suspicious_examples(data, tokenizer)
    if what is None:
        assert not found
        return
    assert len(found) == 1
    assert f"An example in which {what} is trained" in found[0]
    assert "⟦" in found[0]
    assert "\n" not in found[0]
    if what == "everything":
        for loss_scale, trains_prompts in (("all", False), ("default", True)):
            config = make_config(path, entry={"prompt_words": prompt_words}, sequence_len=2048, loss_scale=loss_scale)
            data = prepare(config, tokenizer, formats, trains_prompts=trains_prompts)
            assert not suspicious_examples(data, tokenizer)
            assert not any("every token is trained" in warning for warning in data.report.warnings)
