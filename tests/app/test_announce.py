import sys

import pytest

from surogate_core.app.announce import announce
from surogate_core.cli.main import main


def test_only_a_terminal_is_told(monkeypatch, capsys):
    announce("Loading a model.")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    announce("Loading a model.")
    assert capsys.readouterr() == ("", "Loading a model.\n")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["plan", "nonesuch=1"], "Planning: the layers are traced"),
        (["chat", "no/such/model"], "Loading no/such/model."),
        (["demo", "nonesuch=1"], "The demo trains a tiny model"),
    ],
)
def test_the_first_line_comes_before_the_work(words, first, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(first)
