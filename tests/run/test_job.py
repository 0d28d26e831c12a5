"""A run as data: it is rebuilt from plain values, here and in other processes, and gives the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core import logs
from surogate_core.app.starting import start
from surogate_core.config.resolve import load_run_config, to_dict
from surogate_core.errors import ConfigError, PluginError
from surogate_core.mesh.mesh import Mesh
from surogate_core.plugins.registry import Registry
from surogate_core.run.job import RunJob
from surogate_core.run.watch import Watch

History = Callable[[Path], list[tuple[Any, ...]]]

ELSEWHERE = """
import json, sys
from surogate_core.run.job import RunJob
with open(sys.argv[1]) as file:
    job = RunJob.from_json(json.load(file))
import torch
torch.set_num_threads(1)
sys.exit(job.run())
"""


def job_of(registry: Registry, *overrides: str) -> RunJob:
    return RunJob.of(load_run_config(list(overrides), registry=registry), registry)


@pytest.mark.slow
def test_a_copied_job_gives_the_same_bits_in_another_process(
    tmp_path: Path, base: list[str], installed: Registry, history: History, digests: Any
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    base = [word for word in base if not word.startswith("max_steps")]
    base = [*base, "max_steps=2", "lora=true", "lora_rank=4"]
    assert job_of(installed, *base, f"output_dir={here}").run(registry=installed) == 0
    (tmp_path / "job").write_text(json.dumps(job_of(installed, *base, f"output_dir={there}").to_json()))
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "job")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert history(there) == history(here)
    assert digests(there / "adapter") == digests(here / "adapter")
    assert digests(there / "checkpoint-2") == digests(here / "checkpoint-2")
    # The log of a process of its own is where a run's log is.
    lines = [json.loads(line) for line in (there / "surogate.log").read_text().splitlines()]
    assert any(line["event"] == "set up" for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        ("model=qwen3", "recipe=fp8-hybrid", "monitor=[console,tensorboard]", "monitor.tensorboard.directory='a ${b'"),
        ("task=pt", "model.config={num_hidden_layers: 1}", "offload=host", "resume_from_checkpoint=false"),
        ("rope_scaling={rope_type: linear, factor: 2.0}", "plugins.block=[nothing-real]", "monitor=[]"),
    ],
)
def test_a_job_is_json_and_rebuilds_the_configuration(words: tuple[str, ...]) -> None:
    from surogate_core.config.resolve import config_from, peek_policy
    from surogate_core.plugins import import_policy, load_plugins

    registry = load_plugins(import_policy(peek_policy(words)))
    config = load_run_config([word.replace("${", "\\${") for word in words], registry=registry)
    job = RunJob.of(config, registry)
    again = RunJob.from_json(json.loads(json.dumps(job.to_json())))
    assert again == job
    assert config_from(again.config, registry) == config
    assert to_dict(config_from(again.config, registry)) == job.config
    assert job.task == config.task


def test_other_plugins_than_the_launchers_are_refused(tmp_path: Path, base: list[str], installed: Registry) -> None:
    job = job_of(installed, *base, f"output_dir={tmp_path / 'out'}")
    other = RunJob(config=job.config, plugins=(*job.plugins[:-1], ("monitor-odd", "1.0")))
    with pytest.raises(PluginError, match=r"other plugins than the one that launched it: monitor-odd 1\.0, "):
        other.run()
    assert not (tmp_path / "out").exists()


def test_one_process_for_several_gpus_is_refused(tmp_path: Path, base: list[str], installed: Registry) -> None:
    """A launcher that knows nothing of `gpus` must not train on one of them in silence."""
    job = job_of(installed, *base, "gpus=2", f"output_dir={tmp_path / 'out'}")
    with pytest.raises(ConfigError, match="gpus: launcher=local started one process for 2 GPUs"):
        job.run(registry=installed)
    with pytest.raises(ValueError, match="rank 1 of 1"):
        job.run(rank=1, registry=installed)
    assert not (tmp_path / "out").exists()


def test_keys_are_held_against_the_number_of_ranks_that_another_launcher_chose(
    tmp_path: Path, base: list[str], installed: Registry
) -> None:
    job = job_of(installed, *base, f"output_dir={tmp_path / 'run'}", "lora=false", "optimizer=normuon")
    with pytest.raises(ConfigError, match=r"zero_level: is 1, .* normuon needs whole matrices"):
        job.run(rank=1, world=2, registry=installed)
    assert not (tmp_path / "run").exists()


def test_a_job_with_callbacks_stays_in_its_process(installed: Registry) -> None:
    config = load_run_config(["model=qwen3"], registry=installed)
    with pytest.raises(ConfigError, match=r"callbacks: they run in the process that trains.*Fix: gpus=1"):
        RunJob.of(config, installed, Watch(callbacks={"mine": lambda info: None})).to_json()
    job = RunJob.of(config, installed, Watch(quiet=True))
    assert RunJob.from_json(job.to_json()).watch.quiet
    assert job.to_json(resume=True)["config"]["resume_from_checkpoint"] is True


def test_a_rank_of_torchrun_takes_the_directory_of_rank_0(
    tmp_path: Path, base: list[str], installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**torchrun, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    mesh = Mesh(rank=1, world=2, swap=lambda value: ["runs/of-rank-0", value])
    monkeypatch.setattr("surogate_core.launch.local.joined", lambda found: mesh)
    trained, placed = [], []
    monkeypatch.setattr("surogate_core.run.run.train", lambda config, *a, **b: trained.append(config) or 0)
    config = load_run_config(base, registry=installed)
    with logs.contained():
        assert start(config, installed, Watch(placed=placed.append)) == 0
    assert (trained[0].gpus, trained[0].output_dir) == (2, "runs/of-rank-0")
    assert placed == ["runs/of-rank-0"]
    # No directory of its own, and nothing of rank 0's but a log.
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "runs/of-rank-0/surogate.rank-1.log"
    ]


def test_what_traces_is_imported_without_the_collector(
    run_here: Callable[..., int], base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported by the first op that happens to need it, it took half a second longer."""

    class ImportedError(Exception):
        pass

    def note() -> None:
        raise ImportedError

    monkeypatch.setattr("surogate_core.run.job.quick_import_tracing", note)
    with pytest.raises(ImportedError):
        run_here(tmp_path / "out", *base)
