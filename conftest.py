"""For all tests of the repository: the same examples in every run, and what plugins' tests need anywhere."""

import gc
import os
import time

import pytest
from hypothesis import settings

pytest_plugins = ["pytester", "surogate_testing.pytest_plugin"]

settings.register_profile("repository", derandomize=True, deadline=None)
settings.load_profile("repository")

_settled = pytest.StashKey[str]()
_began = time.monotonic()


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
    torch, transformers and all collected tests takes 0.2 s, and was a fifth of the time of the tests.
    """
    minutes = float(os.environ.get("SUROGATE_TEST_MINUTES", "inf"))
    if time.monotonic() - _began > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of SUROGATE_TEST_MINUTES are over")
    file = item.nodeid.partition("::")[0]
    if item.session.stash.get(_settled, "") != file:
        item.session.stash[_settled] = file
        gc.collect()
        gc.freeze()
