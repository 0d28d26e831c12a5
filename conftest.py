"""For all tests of the repository: the same examples in every run, and what plugins' tests need anywhere."""

from hypothesis import settings

pytest_plugins = ["pytester", "surogate_core.testing.pytest_plugin"]

settings.register_profile("repository", derandomize=True, deadline=None)
settings.load_profile("repository")
