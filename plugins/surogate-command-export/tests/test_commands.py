"""`surogate merge` and `surogate export`: their words, what they show while they work, and what leaves the machine."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from surogate_command_export import export_command
from surogate_command_export import merge_command as command
from surogate_command_export.push import parse_repo

from surogate_core.plugin import UserError

SUROGATE_PLUGIN = "command-export"


def test_conformance(surogate_check):
    surogate_check.run()


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for module in (command, export_command):
        assert module.main(["--help"]) == 0
        assert capsys.readouterr().out == module.USAGE


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (command, ["--outputs", "a"], "surogate merge: --outputs is not known. Fix: --output"),
        (command, ["a", "--output"], "--output: a value must follow. Fix: --output DIR"),
        (command, ["a", "b"], "RUN: is given twice (a, b). Fix: keep one."),
        (command, ["a", "--output="], "surogate merge: --output: the value is empty"),
        (export_command, ["RUN", "--too", "x"], "--too is not known. Fix: --to"),
        (export_command, ["RUN"], "--to missing. Fix: --to hub://USER/NAME, or --to DIR"),
        (export_command, ["RUN", "b", "--to", "x"], "one at a time"),
        (export_command, ["RUN", "--to", "there", "device=cpu"], "device=cpu: keys are for --format"),
    ],
)
def test_wrong_words_are_one_clear_message(module, words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        module.main([str(tmp_path) if word == "RUN" else word for word in words])
    assert message in str(error.value)


def test_a_repository_has_an_owner_and_a_name() -> None:
    assert parse_repo("hub://me/tiny") == "me/tiny"
    for place, message in (("hub://tiny", "Fix: --to hub://USER/tiny"), ("hub://me/a b", "Fix: --to hub://USER/a-b")):
        with pytest.raises(UserError) as error:
            parse_repo(place)
        assert message in str(error.value)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    with command._shown() as progress:
        for done in range(0, 5_000_001, 1_000_000):
            progress(done, 5_000_000)
    text = terminal.getvalue()
    assert "merging" in text
    assert "5.0/5.0 MB" in text
    assert "━" in text


def test_elsewhere_there_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with command._shown() as progress:
        for done in range(11):
            progress(done * 10**9, 10 * 10**9)
    assert capsys.readouterr().err == "merging: 9.31 GiB of 9.31 GiB, 100%\n"
    monkeypatch.setattr(command._Lines, "SECONDS", 0.0)
    with command._shown() as progress:
        progress(10**9, 4 * 10**9)
    assert capsys.readouterr().err == "merging: 954 MiB of 3.73 GiB, 25%\n"
