"""For all tests of the repository: the same examples in every run, and what plugins' tests need anywhere."""

import gc
import os
import time
from collections.abc import Iterator
from unittest import mock

import pytest
from hypothesis import settings

pytest_plugins = ["pytester", "surogate_testing.pytest_plugin"]

settings.register_profile("repository", derandomize=True, deadline=None)
settings.load_profile("repository")

_settled = pytest.StashKey[str]()
_began = time.monotonic()
_thawed = False
"""Whether a run of this process has put all objects back into the garbage collector's passes."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: nothing is garbage yet, and its passes were a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with another file each day, if SUROGATE_TEST_DAY counts the days.

    With SUROGATE_TEST_MINUTES, which skips what begins too late, every test has its turn.
    """
    files = list(dict.fromkeys(item.path for item in items))
    if files and (day := int(os.environ.get("SUROGATE_TEST_DAY", 0))):
        first = day * 7919 % len(files)
        turn = {file: number for number, file in enumerate(files[first:] + files[:first])}
        items.sort(key=lambda item: turn[item.path])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that begins after the minutes of SUROGATE_TEST_MINUTES, if that is set.

    Before the first test of a file, take what exists out of the garbage collector's passes: a pass over the objects of
    torch, transformers and all collected tests takes 0.2 s and more, and was a fifth of the time of the tests. So after
    a run, which puts them back; what is garbage then is found when the next run does so.
    """
    minutes = float(os.environ.get("SUROGATE_TEST_MINUTES", "inf"))
    if time.monotonic() - _began > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of SUROGATE_TEST_MINUTES are over")
    file = item.nodeid.partition("::")[0]
    if item.session.stash.get(_settled, "") != file:
        item.session.stash[_settled] = file
        gc.collect()
        _freeze()
    elif _thawed:
        _freeze()


def _freeze() -> None:
    global _thawed
    gc.freeze()
    _thawed = False


@pytest.fixture(autouse=True, scope="session")
def it_is_known_when_objects_are_put_back() -> Iterator[None]:
    """See `pytest_runtest_setup`."""
    unfreeze = gc.unfreeze

    def thaw() -> None:
        global _thawed
        unfreeze()
        _thawed = True

    with mock.patch.object(gc, "unfreeze", thaw):
        yield


@pytest.fixture(autouse=True, scope="session")
def what_all_runs_repeat_is_done_once() -> Iterator[None]:
    """Tracing equal programs and hashing the same plugins is more than half of the time of a small run."""
    from digested_once import digested_once
    from traced_once import traced_once

    with traced_once(), digested_once():
        yield
