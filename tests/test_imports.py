"""Importing much at once: the collector does not run meanwhile, and is afterwards as it was."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from surogate_core.imports import quick_import


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_rests_during_an_import_and_skips_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "much_code.py").write_text("import gc\nenabled = gc.isenabled()\n")
    (tmp_path / "broken_code.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    gc.unfreeze()
    quick_import("much_code")
    assert not sys.modules["much_code"].enabled
    assert gc.isenabled()
    assert gc.get_freeze_count()
    gc.unfreeze()
    quick_import("much_code")
    assert not gc.get_freeze_count(), "nothing was imported, so garbage of a run before would be kept"
    with pytest.raises(ZeroDivisionError):
        quick_import("broken_code")
    assert gc.isenabled()
    gc.disable()
    try:
        del sys.modules["much_code"]
        quick_import("much_code")
        assert not gc.isenabled(), "the caller had switched it off"
    finally:
        gc.enable()
