"""Ranks with a GPU each have what virtual ranks have, eagerly and in replays of a CUDA graph."""

from __future__ import annotations

import os

import pytest

from surogate_core.launch.gpus import visible
from surogate_core.mesh.offers import FABRICS
from surogate_core.testing import fabrics


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["auto", "copy_engines", "nccl"])
def test_gpus_have_the_bits_of_virtual_ranks(name: str) -> None:
    if len(visible(os.environ)) < fabrics.WORLD:
        pytest.skip("needs two GPUs")
    (spec,) = (spec for spec in FABRICS if spec.name == name)
    for check in fabrics.CHECKS:
        check(spec)
