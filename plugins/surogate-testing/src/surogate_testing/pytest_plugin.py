"""The pytest plugin: a test with the argument `surogate_check` runs once for every check of one plugin.

``SUROGATE_PLUGIN`` in the test's module names the plugin, or ``--surogate-plugin`` does. Without an NVIDIA GPU, tests
marked ``gpu`` are skipped, however they are selected.
"""

from __future__ import annotations

import pytest

from surogate_testing.check import NotApplicable
from surogate_testing.suites import checks

# With this, a failure of a shared test shows its values, like that of the plugin's own tests.
pytest.register_assert_rewrite("surogate_testing.attention_suite", "surogate_testing.family_suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--surogate-plugin``."""
    group = parser.getgroup("surogate")
    group.addoption("--surogate-plugin", metavar="NAME", help="the installed plugin that `surogate_check` tries")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of plugins' tests."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "slow: takes minutes")
    config.addinivalue_line("markers", "slow_cases(*ids): cases with such an id, or a part of it, are slow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow cases of tests with several, before ``-m`` chooses."""
    for item in items:
        found = str(getattr(getattr(item, "callspec", None), "id", ""))
        for mark in item.iter_markers("slow_cases"):
            if {found, *found.split("-")}.intersection(mark.args):
                item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests on a machine without a GPU."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each check."""
    if "surogate_check" not in metafunc.fixturenames:
        return
    name = metafunc.config.getoption("--surogate-plugin") or getattr(metafunc.module, "SUROGATE_PLUGIN", None)
    if not name:
        raise pytest.UsageError("surogate_check: name a plugin as SUROGATE_PLUGIN in the module or --surogate-plugin")
    metafunc.parametrize("surogate_check", checks(name), ids=str)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    """A check that does not apply is a skipped test."""
    try:
        return (yield)
    except NotApplicable as reason:
        pytest.skip(str(reason))
