"""For all tests of the repository: the same examples in every run, so that a red CI can be repeated."""

from hypothesis import settings

pytest_plugins = ["pytester"]

settings.register_profile("repository", derandomize=True, deadline=None)
settings.load_profile("repository")
