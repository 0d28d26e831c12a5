"""Whose fault an error is: the core and the kit are not the plugin."""

import os
from pathlib import Path

import pytest
import torch

import surogate_core
from surogate_core.service.kernels import updates
from surogate_testing import guard
from surogate_testing.hostreads import no_host_reads


@pytest.mark.parametrize("file", [surogate_core.__file__, updates.__file__, guard.__file__, os.__file__])
def test_the_core_the_kit_and_libraries_are_no_plugin(file: str) -> None:
    assert not guard._is_plugins(Path(file), None)


def test_any_other_file_is_the_plugins(tmp_path: Path) -> None:
    assert guard._is_plugins(tmp_path / "mine.py", None)


def test_a_value_that_is_read_outside_of_the_core_is_refused() -> None:
    with pytest.raises(AssertionError, match="step reads a tensor's value on the host"), no_host_reads("step"):
        bool(torch.ones(()))


def test_an_op_of_the_core_may_read_on_a_cpu() -> None:
    source = compile(
        "def read(x):\n    return bool(x)\n", str(Path(surogate_core.__file__).parent / "kernels" / "op.py"), "exec"
    )
    names: dict[str, object] = {}
    exec(source, names)
    with no_host_reads("step"):
        assert names["read"](torch.ones(()))  # type: ignore[operator]
