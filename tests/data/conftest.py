"""A word tokenizer, a format and configurations small enough to check by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from surogate_dataset_chat import EMBEDDED_TOKENIZER
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from surogate_core.bundles import DatasetFormat
from surogate_core.config.schema import RunConfig
from surogate_core.data.encoded import EncodeContext, Encoded, RowError
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_testing import chat_templates


@dataclass(frozen=True, slots=True, kw_only=True)
class WordOptions:
    """Options of the tests' format."""

    field: str = "text"
    """Field that holds the words."""
    prompt_words: int = 1
    """Words at the beginning that are not trained."""


def encode_words(row: Mapping[str, Any], options: WordOptions, context: EncodeContext) -> Encoded:
    """Words as ids; the first ones are the prompt."""
    text = row.get(options.field)
    if not isinstance(text, str):
        raise RowError(f"field {options.field!r} is missing")
    ids = context.tokenizer(text)["input_ids"]
    return Encoded.from_mask(ids, [i >= options.prompt_words for i in range(len(ids))])


WORDS = DatasetFormat(name="words", options=WordOptions, encode=encode_words)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerBase]:
    """Makes a tokenizer whose words w0 … w<n-1> have the ids 0 … n-1; <e> has 1 and <p> has 2."""

    def make(words: int = 100, **options: Any) -> PreTrainedTokenizerBase:
        names = ["w0", "<e>", "<p>", *(f"w{i}" for i in range(3, words))]
        backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", pad_token="<p>", **options)

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    """The tests' tokenizer."""
    return make_tokenizer()


@pytest.fixture
def words() -> DatasetFormat:
    """The tests' format."""
    return WORDS


@pytest.fixture
def formats() -> dict[str, DatasetFormat]:
    """The formats that the tests' runs know."""
    return {"words": WORDS}


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes JSONL; a string is written as it is."""

    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a configuration of one data set, cached in the test's directory."""

    def make(path: Path | str, *, entry: Mapping[str, Any] | None = None, **keys: Any) -> RunConfig:
        keys = {"sequence_len": 16, "data_cache_dir": str(tmp_path / "cache"), "validation_split_ratio": 0.0} | keys
        return RunConfig(datasets=[{"path": str(path), "type": "words", **(entry or {})}], **keys)

    return make


@pytest.fixture
def document_rows() -> list[dict[str, str]]:
    """40 rows of 2 to 14 words."""
    return [{"text": " ".join(f"w{3 + (7 * i + j) % 90}" for j in range(2 + (5 * i) % 13))} for i in range(40)]


@pytest.fixture(scope="session")
def templated() -> Callable[[str], Any]:
    """The embedded tokenizer with a template, and that template's end-of-turn token."""
    return partial(chat_templates.templated, make=partial(load_tokenizer, EMBEDDED_TOKENIZER))
