"""Fixtures that the tests of several plugins share: a ``conftest.py`` imports the ones that it needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_testing import chat_templates


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small products on several threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_log_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log directory for each test instead of the user's."""
    monkeypatch.setenv("SUROGATE_LOG_DIR", str(tmp_path / "logs"))


@pytest.fixture(autouse=True, scope="session")
def nothing_kept() -> Iterator[None]:
    """Every plan counts anew: a test may have replaced what is counted, and no count of a test is for the user."""

    def unknown(registry: Any) -> Any:
        raise OSError("the code of tests changes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("surogate_core.setup.kept._code", unknown)
        yield


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 as transformers writes it, with the embedded tokenizer."""
    from surogate_testing.pretrained import write_model

    return write_model(tmp_path_factory.mktemp("hf") / "qwen3")


@pytest.fixture
def model_copy(hf_dir: Path, tmp_path: Path) -> Path:
    """A copy of `hf_dir` to damage."""
    return Path(shutil.copytree(hf_dir, tmp_path / "base"))


@pytest.fixture(scope="session")
def templated() -> Callable[[str], Any]:
    """A tokenizer of bytes with a template ("none": without), and that template's end-of-turn token."""
    return chat_templates.templated
