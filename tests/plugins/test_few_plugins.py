"""The core and one plugin of each kind that a run must choose, as wheels in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from environments import Environment
from wheels import unpack

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = ("model-qwen3", "recipe-bf16", "optimizer-adamw", "dataset-chat")
"""A run chooses a model, a recipe, an optimizer and a format of its data: none of them is the core's, which prefers no
plugin to another. The embedded example is in the last."""


def built(project: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=project, capture_output=True, timeout=120, check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_example_trains_with_one_plugin_of_each_kind(tmp_path: Path) -> None:
    environment = Environment(tmp_path, without="*surogate*")
    projects = [ROOT / "core", *(ROOT / "plugins" / f"surogate-{name}" for name in CHOSEN)]
    for number, project in enumerate(projects):
        unpack(built(project, tmp_path / str(number)), environment.site)
    words = ["optimizer=adamw", "max_steps=3", "device=cpu", f"output_dir={tmp_path / 'run'}"]
    logs = {"SUROGATE_LOG_DIR": str(tmp_path / "logs"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = environment.run("surogate_core", "sft", *words, cwd=tmp_path, **logs)
    assert list((tmp_path / "run").rglob("*.safetensors")), said
    said = environment.run("surogate_core", "plan", *words, cwd=tmp_path, code=2, **logs)
    assert "surogate plan: its plugin surogate-command-plan is not installed. Fix: pip install" in said
    said = environment.run("surogate_core", "sft", *words, "monitor=[console]", cwd=tmp_path, code=2, **logs)
    assert "its plugin surogate-monitor-console is not installed" in said
