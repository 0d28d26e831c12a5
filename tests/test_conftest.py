"""What the repository's conftest.py does to all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


@pytest.mark.parametrize("gpu", [False, True])
def test_what_wants_a_gpu_is_skipped_without_one(
    gpu: bool, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU")
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_gpu(): pass\ndef test_cpu(): pass\n")
    outcomes = pytester.runpytest_inprocess("-p", "no:cacheprovider").parseoutcomes()
    assert outcomes == ({"passed": 2} if gpu else {"passed": 1, "skipped": 1})


def test_tests_that_begin_too_late_are_skipped(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    root = request.config.pluginmanager.get_plugin(str(request.config.rootpath / "conftest.py"))
    monkeypatch.setenv("SUROGATE_TEST_MINUTES", "0")
    with pytest.raises(pytest.skip.Exception, match="the 0 minutes of SUROGATE_TEST_MINUTES are over"):
        root.pytest_runtest_setup(request.node)
