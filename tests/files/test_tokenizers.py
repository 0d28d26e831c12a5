"""Tokenizer files that would take the memory or the time of the machine, and panics of the code that reads them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli import main as cli
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import UserError
from surogate_core.files import tokenizers
from surogate_core.files.paths import resolve_package_path

LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = Path(resolve_package_path("pkg://surogate_dataset_chat/embedded/tokenizer"))
    return shutil.copytree(source, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("__*"))


def change(directory: Path, **parts: Any) -> Path:
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **parts}))
    return file


def charsmap(longest: int) -> str:
    return base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"ab\0" + b"c" * longest + b"\0").decode()


def test_rules_that_write_far_more_than_they_read_are_refused(directory: Path) -> None:
    for part, rules in (
        ("normalizer", {"type": "Sequence", "normalizers": [LONGER] * 6}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [LONGER] * 3}]}),
        ("decoder", {"type": "Sequence", "decoders": [LONGER] * 6}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 2000}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap(5000)}),
    ):
        place = shutil.copytree(directory, directory.with_name("changed"), dirs_exist_ok=True)
        file = change(place, **{part: rules})
        with pytest.raises(UserError, match=rf"{file}: the rules of its {part} write up to [\d,]+ characters for one"):
            load_tokenizer(str(place))


def test_rules_that_exist_are_read(directory: Path) -> None:
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    rules = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space, {"type": "NFKC"}]}
    change(directory, normalizer=rules)
    assert load_tokenizer(str(directory))("a b")["input_ids"]
    assert tokenizers._growth({"type": "Precompiled", "precompiled_charsmap": charsmap(18)}) == 18


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json"])
def test_a_pipe_in_place_of_a_file_is_refused(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(UserError, match=rf"{directory / name} cannot be read: it is not a regular file"):
        load_tokenizer(str(directory))


def test_nested_json_is_refused(directory: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(b"[" * 100_000)
        with pytest.raises(UserError, match=rf"{directory / name} is not valid JSON: it is nested too deep"):
            load_tokenizer(str(directory))
        (directory / name).write_bytes(content)


def test_a_panic_names_the_tokenizer(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rust's panics are no `Exception`: the command ended with a traceback."""
    monkeypatch.setattr(tokenizers, "_loaded", {})
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    change(directory, pre_tokenizer=split)
    tokenizer = load_tokenizer(str(directory))
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: tokenizer("a" * 3000 + "!")["input_ids"])
    assert cli.main(["generate"]) == 2
    error = capsys.readouterr().err
    assert f"surogate: tokenizer {directory}: its rules failed: " in error
    assert "Traceback" not in error
    with pytest.raises(UserError, match="tokenizer mine: its rules failed"), tokenizers.named_panics("mine"):
        tokenizer("a" * 3000 + "!")
