"""For all tests of the repository: the same examples in every run, and none that wants a GPU where there is none."""

import pytest
from hypothesis import settings

pytest_plugins = ["pytester"]

settings.register_profile("repository", derandomize=True, deadline=None)
settings.load_profile("repository")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` on a machine without one, however it was selected."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
