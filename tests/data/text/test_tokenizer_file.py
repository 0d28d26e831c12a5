"""tokenizer.json decides, whatever class the directory names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import UserError
from surogate_testing.chat_templates import byte_tokenizer

END = "<|endoftext|>"
TEXT = "Order 2024 of 12345 left: in 1999, ﬁne…  Café é\n\n  \tX"
SPLIT = r"\d{1,3}| ?[A-Za-z]+|\s+|[^\sA-Za-z\d]+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def bytes_of(pattern: str, *, prefix: bool = False, trim: bool = True) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False, trim_offsets=trim),
        ]
    )


def begun(tokenizer: Any) -> None:
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])


KINDS: dict[str, Callable[[Any], None]] = {
    "digits": lambda t: setattr(t, "pre_tokenizer", bytes_of(SPLIT)),
    "gpt2": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix": lambda t: setattr(t, "pre_tokenizer", bytes_of(QWEN, prefix=True)),
    "lowercase": lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
    "nfkc": lambda t: setattr(t, "normalizer", normalizers.NFKC()),
    "begun": begun,
    "nothing": lambda t: setattr(t, "post_processor", processors.ByteLevel(trim_offsets=False)),
}


def write(path: Path, change: Callable[[Any], None], family: str, named: str | None, **more: Any) -> Any:
    """A directory with a tokenizer, and the tokenizer that its file means."""
    raw: Any = Tokenizer(models.BPE())
    raw.normalizer, raw.decoder = normalizers.NFC(), decoders.ByteLevel(trim_offsets=False)
    raw.pre_tokenizer = bytes_of(QWEN, trim=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([TEXT] * 9, trainer)
    change(raw)
    path.mkdir()
    raw.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    config = {"eos_token": END, "chat_template": "{{ messages[0].content }}"} | more
    (path / "tokenizer_config.json").write_text(json.dumps(config | ({"tokenizer_class": named} if named else {})))
    return raw


FAMILIES = [
    ("llama", "PreTrainedTokenizerFast"),
    ("llama", "LlamaTokenizerFast"),
    ("qwen2", "PreTrainedTokenizerFast"),
    ("qwen2", "LlamaTokenizerFast"),
    ("qwen2", None),
    ("qwen3", "Qwen2Tokenizer"),
    ("qwen3", None),
    ("mistral", "LlamaTokenizer"),
    ("gemma", "GemmaTokenizerFast"),
    ("llama", "CodeLlamaTokenizer"),
    ("gpt2", "GPT2TokenizerFast"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_ids_of_the_file(tmp_path: Path, kind: str) -> None:
    for number, (family, named) in enumerate(FAMILIES):
        notes: list[str] = []
        raw = write(tmp_path / str(number), KINDS[kind], family, named)
        found = load_tokenizer(str(tmp_path / str(number)), note=notes.append)
        assert found(TEXT)["input_ids"] == raw.encode(TEXT).ids, (family, named)
        assert found.eos_token == END
        assert found.chat_template == "{{ messages[0].content }}"
        assert len(notes) <= 1
        if (family, named) == ("qwen2", "PreTrainedTokenizerFast") and kind not in ("begun", "nothing"):
            assert "tokenizer.json is used as it is" in notes[0]


def test_a_tokenizer_like_its_file_keeps_its_class(tmp_path: Path) -> None:
    notes: list[str] = []
    for number, flags in enumerate(({}, {"add_bos_token": False, "add_prefix_space": False})):
        write(tmp_path / str(number), KINDS["nothing"], "qwen2", "Qwen2Tokenizer", **flags)
        found = load_tokenizer(str(tmp_path / str(number)), note=notes.append)
        assert type(found).__name__ == "Qwen2Tokenizer"
    assert not notes


def test_dropout_of_the_file_is_off_and_said(tmp_path: Path) -> None:
    notes: list[str] = []
    for number, family in enumerate(("llama", "qwen2")):
        path = tmp_path / str(number)
        raw = write(path, KINDS["digits"], family, "PreTrainedTokenizerFast")
        content = json.loads((path / "tokenizer.json").read_text())
        content["model"]["dropout"] = 0.5
        (path / "tokenizer.json").write_text(json.dumps(content))
        found = load_tokenizer(str(path), note=notes.append)
        assert all(found(TEXT)["input_ids"] == raw.encode(TEXT).ids for _ in range(9))
    assert [note for note in notes if "BPE dropout" in note] == notes[:1] + notes[2:]


def test_a_sampling_sentencepiece_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer.model").write_bytes(b"")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"sp_model_kwargs": {"enable_sampling": True}}))
    slow: Any = byte_tokenizer()
    monkeypatch.setattr(type(slow), "is_fast", False)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: slow)
    with pytest.raises(UserError, match=r"enable_sampling.*Fix: "):
        load_tokenizer(str(tmp_path))
