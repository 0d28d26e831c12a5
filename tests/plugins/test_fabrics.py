"""A stranger's fabric: a run of two processes that exchange everything through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.plugins.new import new_plugin

History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "max_steps=3", "eval_steps=2", "save_steps=2")


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The directories of an installed plugin, for PYTHONPATH."""
    package = new_plugin("by-files", "fabric", tmp_path)
    metadata = package / "src" / "surogate_fabric_by_files-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: surogate-fabric-by-files\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[surogate]\nfabric-by-files = surogate_fabric_by_files\n")
    return package / "src"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [LORA, ("lora=false", "zero_level=3", *LORA[3:], "exact_reduction=true")])
def test_a_run_over_a_strangers_fabric_has_the_bits_of_one_process(
    keys: tuple[str, ...], plugin: Path, tmp_path: Path, base: list[str], history: History, digests: Digests
) -> None:
    def run(output: Path, *more: str) -> None:
        command = [sys.executable, "-m", "surogate_core", "sft", *base, *keys, *more, f"output_dir={output}"]
        environment = {**os.environ, "PYTHONPATH": str(plugin), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    one, two, links = (tmp_path / name for name in ("one", "two", "links"))
    links.mkdir()
    run(one, "gradient_accumulation_steps=4")
    fabric = ("fabric=by-files", f"fabric.directory={links}")
    run(two, "gradient_accumulation_steps=2", "gpus=2", *fabric)
    assert history(two) == history(one)
    assert digests(two / "checkpoint-2") == digests(one / "checkpoint-2")
    assert not list(links.iterdir()), "the fabric was not closed"
    assert json.loads((two / "run.json").read_text())["gpus"] == 2

    # One process builds no fabric, so one that cannot work does no harm.
    run(tmp_path / "alone", "gradient_accumulation_steps=4", "fabric=by-files", f"fabric.directory={tmp_path}/no")
