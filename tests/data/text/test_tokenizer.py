"""Tokenizers: loading errors and the fit of vocabularies."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from surogate_core.data.text import tokenizer as module
from surogate_core.data.text.tokenizer import (
    check_vocabulary,
    load_tokenizer,
    padding_id,
    tokenizer_digest,
    vocabulary_size,
)
from surogate_core.errors import UserError


def test_a_saved_tokenizer_loads_and_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("w5 w6")["input_ids"] == [5, 6]
    assert tokenizer_digest(load_tokenizer(str(tmp_path))) == tokenizer_digest(loaded)


def test_a_version_that_needs_more_of_scikit_learn_is_imported_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, tmp_path: Path
) -> None:
    def fails(name: str) -> None:
        raise ImportError("cannot import name 'f1_score' from 'sklearn.metrics'")

    monkeypatch.setattr(module, "quick_import", fails)
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).get_vocab() == tokenizer.get_vocab()


def test_a_config_that_transformers_cannot_read_is_named(tokenizer: Any, tmp_path: Path) -> None:
    """The tokenizer's own files are whole."""
    tokenizer.save_pretrained(tmp_path)
    text = '{"model_type": "exaone4", "num_hidden_layers": 2, "sliding_window_pattern": 0}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        UserError, match=r"reads config\.json beside it, and cannot: ZeroDivisionError: .*\. Fix: correct"
    ):
        load_tokenizer(str(tmp_path))


def test_a_model_that_transformers_does_not_know_is_no_warning(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a family's; other warnings come through."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody", "architectures": ["NobodyForCausalLM"]}')
    heard: list[str] = []
    logger = logging.getLogger("transformers.configuration_utils")
    monkeypatch.setattr(
        logger, "handle", lambda record: heard.append(record.getMessage()) if logger.filter(record) else 0
    )
    AutoTokenizer.from_pretrained(tmp_path)
    assert any("a model of type `nobody`" in text for text in heard), "transformers warns no more: drop the filter"
    heard.clear()
    load_tokenizer(str(tmp_path))
    assert heard == []
    logger.warning("something else")
    assert heard == ["something else"]


def test_the_vocabularies_must_fit(tokenizer: Any) -> None:
    check_vocabulary(tokenizer, 100)
    with pytest.raises(UserError, match=r"ids up to 99 .* 96 entries .*Fix: .*vocab_size=128"):
        check_vocabulary(tokenizer, 96)


def test_the_padding_id_is_a_valid_one(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    assert padding_id(tokenizer) == 2
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == 1
    tokenizer.eos_token = None
    assert padding_id(tokenizer) == 0


@pytest.mark.parametrize("state", ["missing", "empty", "file", "truncated", "control", "config only"])
def test_a_bad_tokenizer_is_one_clear_line(tokenizer: Any, tmp_path: Path, state: str) -> None:
    path = tmp_path / "tokenizer"
    match state:
        case "empty":
            path.mkdir()
        case "file":
            path.write_text("{}")
        case "truncated":
            tokenizer.save_pretrained(path)
            (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text()[:500])
        case "control":
            tokenizer.save_pretrained(path)
            values = json.loads((path / "tokenizer.json").read_text())
            (path / "tokenizer.json").write_text(json.dumps({**values, "version": "\x1b[2J"}))
        case "config only":
            path.mkdir()
            (path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UserError, match=r"tokenizer .*Fix: ") as caught:
        load_tokenizer(str(path))
    assert str(caught.value).isprintable()


def test_settings_of_a_call_are_no_part_of_the_digest_and_tokens_are(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    fresh, used, larger = (load_tokenizer(str(tmp_path)) for _ in range(3))
    used.backend_tokenizer.enable_padding(pad_token='"added_tokens":')
    used.backend_tokenizer.enable_truncation(3)
    assert tokenizer_digest(used) == tokenizer_digest(fresh)
    larger.add_tokens(["<one more>"])
    assert tokenizer_digest(larger) != tokenizer_digest(fresh)
    assert vocabulary_size(larger) == len(larger.get_vocab()) == vocabulary_size(fresh) + 1
