"""A tiny model on disk, and a log directory of the tests' own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from surogate_testing.pretrained import write_model

# Tensors this small are done before a second thread wakes up.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_log_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUROGATE_LOG_DIR", str(tmp_path / "logs"))


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model as transformers writes it, with a tokenizer."""
    return write_model(tmp_path_factory.mktemp("hf") / "qwen3")


@pytest.fixture
def model_copy(hf_dir: Path, tmp_path: Path) -> Path:
    """A copy of `hf_dir` to damage."""
    return Path(shutil.copytree(hf_dir, tmp_path / "base"))
