"""Names that are imported on first use."""

from __future__ import annotations

import sys

import pytest

from surogate_core.lazy import offered_names

SOURCE = """
from typing import TYPE_CHECKING
from surogate_core.lazy import lazily
import os

if TYPE_CHECKING:
    from json import dumps, decoder
    from string import digits as figures
    from lazy_sample import below
else:
    __getattr__, __dir__, __all__ = lazily(__name__)
"""


@pytest.fixture
def sample(tmp_path, monkeypatch):
    package = tmp_path / "lazy_sample"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE, encoding="utf-8")
    (package / "below.py").write_text("LOADED = True\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("lazy_sample")
    for name in [n for n in sys.modules if n.startswith("lazy_sample")]:
        del sys.modules[name]


def test_names_are_those_imported_for_type_checkers():
    names = {"dumps": ("json", "dumps"), "decoder": ("json", "decoder"), "figures": ("string", "digits")}
    assert offered_names(SOURCE) == names | {"below": ("lazy_sample", "below")}


def test_a_name_is_imported_when_it_is_used(sample):
    assert "lazy_sample.below" not in sys.modules
    assert sample.dumps([1]) == "[1]"
    assert sample.figures == "0123456789"
    assert sample.decoder.JSONDecoder
    assert sample.below.LOADED
    assert sample.__all__ == ["below", "decoder", "dumps", "figures"]
    assert {"dumps", "os"} <= set(dir(sample))


def test_other_names_are_refused(sample):
    with pytest.raises(AttributeError, match="module 'lazy_sample' has no attribute 'nothing'"):
        sample.nothing  # noqa: B018
