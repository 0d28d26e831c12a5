"""Ranks with a GPU each have what virtual ranks have, eagerly and in replays of a CUDA graph."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from surogate_core.launch.gpus import VISIBLE, rotated, visible
from surogate_core.mesh.offers import FABRICS
from surogate_testing import fabrics


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "copy_engines", "nccl"])
def test_gpus_have_the_bits_of_virtual_ranks(name: str) -> None:
    if len(visible(os.environ)) < fabrics.WORLD:
        pytest.skip("needs two GPUs")
    (spec,) = (spec for spec in FABRICS if spec.name == name)
    for check in fabrics.CHECKS:
        check(spec)


@pytest.mark.gpu
def test_exchanges_under_way_bring_the_bits_of_those_that_are_waited_for(tmp_path: Path) -> None:
    run_ranks("begun_on_gpus", [[tmp_path / "store"]] * 2)


@pytest.mark.gpu
@pytest.mark.parametrize("near", [2, 4])
def test_groups_inside_a_machine_write_into_shared_memory(near: int, tmp_path: Path) -> None:
    """Four ranks on two GPUs, on two machines and on one."""
    run_ranks("peer_groups", [[near, tmp_path / "store"]] * 4)


def run_ranks(name: str, words: Sequence[Sequence[object]]) -> None:
    """Run a program of tests/support with a rank's number and words for each rank, on two GPUs in turn."""
    gpus = visible(os.environ)
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    program = [sys.executable, str(Path(__file__).parents[1] / "support" / f"{name}.py")]
    with ExitStack() as files:
        said = [files.enter_context(TemporaryFile("w+")) for _ in words]
        ranks = []
        for rank, rest in enumerate(words):
            environment = {**os.environ, VISIBLE: rotated(gpus[:2], rank % 2)}
            command = [*program, str(rank), *map(str, rest)]
            ranks.append(subprocess.Popen(command, env=environment, stderr=said[rank], text=True))
        until = time.monotonic() + 120
        # The others wait for one that failed.
        while time.monotonic() < until and any(r.poll() is None for r in ranks) and not any(r.poll() for r in ranks):
            time.sleep(0.1)
        codes = [process.poll() for process in ranks]
        for process in ranks:
            process.kill()
            process.wait()
        for file in said:
            file.seek(0)
        assert codes == [0] * len(ranks), "\n".join(f"rank {i}: {file.read()}" for i, file in enumerate(said))
