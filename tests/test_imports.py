"""Importing much at once: the collector does not run meanwhile, and is afterwards as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from surogate_core.imports import distributions_when_asked, imported_when_called, put_back_objects, quick_import


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
    put_back_objects()
    assert not gc.get_freeze_count()
    quick_import("much_code")
    assert not gc.get_freeze_count(), "nothing was imported, so garbage of a run before would be kept"
    gc.freeze()
    put_back_objects()
    assert gc.get_freeze_count(), "what a program keeps itself stays kept"
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


def test_a_collector_that_rests_during_an_import_may_pass_over_everything_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_code.py").write_text("import gc\nenabled = gc.isenabled()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    gc.unfreeze()
    quick_import("some_code", keeps=False)
    assert not sys.modules["some_code"].enabled
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_a_function_of_a_large_package_is_imported_when_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large/__init__.py").write_text("")
    (tmp_path / "large/part.py").write_text("LARGE = 7\ndef double(x, *, more=0):\n    return 2 * x + more\n")
    (tmp_path / "needs_it.py").write_text(
        "import large.part as part\nfrom large.part import double\ndef one() -> part.Named: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with imported_when_called("large.part"):
        import needs_it
    assert not {"large", "large.part"} & sys.modules.keys()
    assert needs_it.double(2, more=1) == 5
    assert needs_it.part.LARGE == 7
    assert sys.modules["large.part"].double(2) == 4
    with imported_when_called("large.part"):
        assert sys.modules["large.part"].__file__ == str(tmp_path / "large/part.py"), "it was imported before"
    with imported_when_called("absent"):
        assert "absent" not in sys.modules


def test_tracing_is_imported_without_networkx() -> None:
    line = (
        "import sys; from surogate_core.imports import quick_import_tracing; quick_import_tracing()\n"
        "from torch._functorch._activation_checkpointing.graph_info_provider import nx\n"
        "assert 'networkx' not in sys.modules\n"
        "assert list(nx.DiGraph([(1, 2)]).nodes) == [1, 2]"
    )
    subprocess.run([sys.executable, "-c", line], check=True)


def test_distributions_are_read_when_another_name_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = metadata.packages_distributions(), []

    def counted() -> dict[str, list[str]]:
        calls.append(None)
        return dict(whole)

    monkeypatch.setattr(metadata, "packages_distributions", counted)
    with distributions_when_asked():
        found = metadata.packages_distributions()
    assert metadata.packages_distributions is counted
    for name in ("torch", "transformers", "numpy"):
        assert found[name] == [*dict.fromkeys(whole[name])]
    assert not calls
    assert found["yaml"] == whole["yaml"], "its distribution is PyYAML"
    assert found.get("no_such_package", []) == []
    assert dict(found) == {name: found[name] for name in whole}
    assert len(calls) == 1
