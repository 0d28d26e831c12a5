"""The installed plugins, one thread, and a log directory of the tests' own."""

from __future__ import annotations

import pytest

from surogate_core.plugin import load_plugins
from surogate_core.service.plugins import Registry
from surogate_testing.fixtures import nothing_kept, one_thread, own_log_directory  # noqa: F401


@pytest.fixture(scope="session")
def installed() -> Registry:
    """The plugins of this environment."""
    return load_plugins()
