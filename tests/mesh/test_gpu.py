"""Ranks with a GPU each have what virtual ranks have, eagerly and in replays of a CUDA graph."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
@pytest.mark.parametrize("near", [2, 4])
def test_groups_inside_a_machine_write_into_shared_memory(near: int, tmp_path: Path) -> None:
    """Four ranks on two GPUs, on two machines and on one."""
    gpus = visible(os.environ)
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    program = [sys.executable, str(Path(__file__).parents[1] / "support" / "peer_groups.py")]
    ranks = []
    for rank in range(4):
        environment = {**os.environ, VISIBLE: rotated(gpus[:2], rank % 2)}
        words = [*program, str(rank), str(near), str(tmp_path / "store")]
        ranks.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * 4, "\n".join(said)
