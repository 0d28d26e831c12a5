"""benchmarks/sparse_training.py: equal active sizes, and a run on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sparse_training
from optimizer_training import Setting

from surogate_core.train.flops import ModelFlops


def test_both_kinds_multiply_alike() -> None:
    """But for the router, whose width is the number of experts."""
    setting = Setting()
    dense = ModelFlops.of(sparse_training.build_dense(sparse_training.config_of("dense", setting)), frozen=False)
    sparse = ModelFlops.of(sparse_training.build_sparse(sparse_training.config_of("sparse", setting)), frozen=False)
    assert dense.products_per_token <= sparse.products_per_token <= 1.02 * dense.products_per_token


@pytest.mark.slow
def test_both_kinds_train_on_a_cpu(tmp_path: Path) -> None:
    words = "--tiny --device cpu --rows 2 --length 128 --vocabulary 512 --steps 4 --sweep-steps 2 --held-rows 4"
    command = [sys.executable, sparse_training.__file__, "--out", str(tmp_path), *words.split()]
    subprocess.run([*command, "--megabytes", "2", "--evaluate", "2", "--seeds", "1"], check=True)
    table = (tmp_path / "sparse_training.md").read_text()
    assert all(f"| `{name}` |" in table for name in sparse_training.COMPARISON.rates)
