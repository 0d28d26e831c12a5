"""The installed plugins, one thread, and a log directory of the tests' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from surogate_core.plugin import load_plugins
from surogate_core.service.plugins import Registry


@pytest.fixture(scope="session")
def installed() -> Registry:
    """The plugins of this environment."""
    return load_plugins()


@pytest.fixture(autouse=True, scope="session")
def own_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Logs are not written to those of the user, and small products are not shared out among threads."""
    place, threads = tmp_path_factory.mktemp("plan"), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUROGATE_LOG_DIR", str(place / "logs"))
        yield
    torch.set_num_threads(threads)
