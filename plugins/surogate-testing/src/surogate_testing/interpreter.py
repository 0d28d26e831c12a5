"""Tests of Triton's kernels without a GPU: in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")),
    ],
)
"""The argument `device` of a test: the GPU, or the CPU in the interpreter."""


def starts_interpreter(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test that calls `run_interpreted`. It is skipped without Triton, with a GPU and in the interpreter."""
    here = INTERPRETED or torch.cuda.is_available()
    missing = importlib.util.find_spec("triton") is None
    test = pytest.mark.skipif(here, reason="the tests run in this process")(test)
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="triton is not installed")(test))


def run_interpreted(file: str) -> None:
    """Run the tests of a file in the interpreter; raises `AssertionError` with the end of the output."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:]
