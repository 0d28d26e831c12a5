"""What the repository's conftest.py does to all tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_qwen3 import make_engine, tiny_config

from surogate_testing.tiny import CROSS_ENTROPY

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


def heads_of(**changes: Any) -> list[Any]:
    """The programs of a new engine's head."""
    return list(make_engine(**changes).programs._heads.values())


def test_equal_programs_are_traced_once_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_engine()
    (head,) = first.programs._heads.values()
    assert heads_of() == [head]
    assert make_engine().programs.kernels.labels == first.programs.kernels.labels != {}
    assert heads_of(config=tiny_config(vocab_size=67)) != [head]
    assert heads_of(head_chunks=2) != [head]
    own = replace(CROSS_ENTROPY, token_loss=lambda *arguments: CROSS_ENTROPY.token_loss(*arguments))
    assert heads_of(objective=own) != heads_of(objective=own), "code of a test"
    monkeypatch.setenv("HOME", "/nowhere")
    assert heads_of() == [head]
    with mock.patch.object(torch, "relu", torch.relu):
        assert heads_of() != [head]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "relu", torch.relu)
        assert heads_of() != [head]
    assert heads_of() == [head]
