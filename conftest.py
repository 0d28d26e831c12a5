"""For all tests of the repository: the same examples in every run, and what plugins' tests need anywhere."""

import gc

import pytest
from hypothesis import settings

pytest_plugins = ["pytester", "surogate_core.testing.pytest_plugin"]

settings.register_profile("repository", derandomize=True, deadline=None)
settings.load_profile("repository")

_settled = pytest.StashKey[str]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test of a file: take what exists out of the garbage collector's passes.

    A pass over the objects of torch, transformers and all collected tests takes 0.2 s, and was a fifth of the time of
    the tests.
    """
    file = item.nodeid.partition("::")[0]
    if item.session.stash.get(_settled, "") != file:
        item.session.stash[_settled] = file
        gc.collect()
        gc.freeze()
