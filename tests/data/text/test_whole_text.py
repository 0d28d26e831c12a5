"""Special tokens around a text: the tokenizer's own and those that the text writes, each once."""

from __future__ import annotations

from typing import Any

import pytest
from surogate_dataset_chat import text as text_format
from tokenizers import processors

from surogate_core.data.encoded import EncodeContext
from surogate_core.data.text.labels import tokenize_completion
from surogate_core.data.text.whole_text import encode_rest, encode_whole
from surogate_core.inference.texts import prompt_of_text
from surogate_testing.chat_templates import byte_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"


def tokenizer_with(single: str) -> Any:
    """A byte tokenizer that makes this of every text."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.bos_token = BEGIN
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in (BEGIN, END, "<|endoftext|>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize("single", ["$A", f"{BEGIN} $A", f"{BEGIN} $A {END}", f"$A {END}", f"<|endoftext|> {BEGIN} $A"])
@pytest.mark.parametrize(
    "text", ["Hi", f"{BEGIN}Hi", f" \n{BEGIN}Hi", f"Hi{END}", f"{BEGIN}Hi{END}", f"{BEGIN}Hi{END}\n", " Hi\n"]
)
def test_a_special_token_that_the_text_writes_is_not_repeated(single: str, text: str) -> None:
    tokenizer = tokenizer_with(single)
    begin = 1 if BEGIN in single or BEGIN in text else 0
    for found in (
        encode_whole(tokenizer, text, ended=True),
        text_format.encode({"text": text}, text_format.TextOptions(), context(tokenizer)).input_ids.tolist(),
    ):
        assert found.count(tokenizer.bos_token_id) == begin
        assert found.count(tokenizer.eos_token_id) == 1
        assert found[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(found, skip_special_tokens=True).strip() == "Hi"
    prompt = prompt_of_text(tokenizer, text, name="prompt").ids
    assert prompt.count(tokenizer.bos_token_id) == begin
    assert prompt.count(tokenizer.eos_token_id) == (1 if END in text else 0)


def context(tokenizer: Any) -> EncodeContext:
    return EncodeContext(tokenizer=tokenizer, sequence_len=64)


def test_white_space_that_no_special_token_follows_stays() -> None:
    tokenizer = tokenizer_with(f"{BEGIN} $A {END}")
    assert tokenizer.decode(encode_whole(tokenizer, " Hi \n", ended=True)) == f"{BEGIN} Hi \n{END}"
    assert tokenizer.decode(encode_whole(tokenizer, " Hi \n", ended=False)) == f"{BEGIN} Hi \n"
    assert tokenizer.decode(encode_rest(tokenizer, f" Hi{END} ")) == f" Hi{END}"


@pytest.mark.parametrize("prompt", ["Two? ", f"{BEGIN}Two? ", f" {BEGIN}Two? "])
@pytest.mark.parametrize("answer", ["Four.", f"Four.{END}", f"Four.{END}\n"])
def test_an_answer_continues_the_prompt(prompt: str, answer: str) -> None:
    tokenizer = tokenizer_with(f"{BEGIN} $A {END}")
    document = tokenize_completion(tokenizer, prompt, answer)
    assert tokenizer.decode(document.input_ids) == f"{BEGIN}Two? Four.{END}"
    assert tokenizer.decode(document.input_ids[document.labels >= 0]) == f"Four.{END}"
