"""Fixtures of the comparisons with TRL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of `trl_parity.save_model`."""
    from trl_parity import save_model

    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def no_accelerator_state() -> Iterator[None]:
    """Leaves the process as it was."""
    from trl_parity import same_environment

    with same_environment():
        yield
