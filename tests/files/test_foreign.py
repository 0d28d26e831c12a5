"""JSON, patterns and sizes of a stranger's files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surogate_core.errors import UserError
from surogate_core.files.foreign import check_sizes, matchers, parsed, read_json, wrong_pattern

TEXTS = {
    b"[" * 100_000: "nested too deep",
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000: "nested too deep",
    b"[" * 102 + b"]" * 102: "nested deeper than 100 levels",
    b'{"r": 8, "r": 16}': "the name 'r' twice",
    b'{"a": ["\\ud800"]}': "half a surrogate pair",
    b'{"\\ud800": 1}': "half a surrogate pair",
    b"9" * 5000: "Exceeds the limit",
    b'{"a": "\xff"}': "utf-8",
    b"": "Expecting value",
}


def test_json_that_is_refused() -> None:
    for text, reason in TEXTS.items():
        with pytest.raises(ValueError, match=reason):
            parsed(text)


def test_json_that_is_read() -> None:
    assert parsed(b'{"a": [1, {"b": "\xc3\xa9"}], "c": 1e400}') == {"a": [1, {"b": "é"}], "c": float("inf")}
    assert parsed(b"[" * 100 + b"]" * 100)
    assert parsed('{"r": 8, "r": 16}', twice=True) == {"r": 16}


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link").symlink_to("file")
    for path, reason in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "large", "more than"),
    ):
        with pytest.raises(OSError, match=reason):
            read_json(path)
    assert read_json(tmp_path / "link") == [1]


def test_sizes_that_no_model_has_are_refused() -> None:
    check_sizes({"num_hidden_layers": 126, "hidden_size": 16384, "vocab_size": 262144, "num_experts": None}, "here")
    for values, message in (
        ({"num_hidden_layers": 10**9}, "here: num_hidden_layers is 1000000000, and at most 10,000"),
        ({"num_hidden_layers": 10**5000}, "here: num_hidden_layers is beyond 10^18"),
        ({"vocab_size": float("inf")}, "here: vocab_size is inf"),
        ({"vocab_size": float("nan")}, "here: vocab_size is nan"),
        ({"hidden_size": -(10**12)}, "here: hidden_size is -1000000000000"),
        ({"num_hidden_layers": 5000, "num_experts": 5000}, "num_hidden_layers 5000 times num_experts 5000"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "here: num_hidden_layers is"),
    ):
        with pytest.raises(UserError, match=message.replace("^", r"\^")):
            check_sizes(values, "here")


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$"])
def test_a_pattern_that_takes_years_has_a_limit(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_core.files.foreign.PATTERN_SECONDS", 0.05)
    assert wrong_pattern(pattern) is None
    matches: Callable[[str, str], bool] = matchers({"p": pattern}, "adapter_config.json")
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"adapter_config.json: the regular expression 'p' takes more than 0\.05 s"):
        any(matches("p", "a" * 2000 + f"!{number}") for number in range(1000))
    assert time.monotonic() - begin < 60


def test_patterns_that_are_none() -> None:
    for pattern, reason in (
        ("(", "is no regular expression"),
        ("a" * 1001, "has 1001 characters"),
        ("[b-a]", "is no reg"),
    ):
        assert reason in (wrong_pattern(pattern) or "")
    matches = matchers({"layers": r"(.*\.)?(layers\.\d+\.q_proj)$"}, "here")
    assert [matches("layers", t) for t in ("model.layers.12.q_proj", "layers.1.q_proj", "xlayers.1.q_proj")] == [
        True,
        True,
        False,
    ]
