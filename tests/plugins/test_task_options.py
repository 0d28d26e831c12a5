"""Tasks with options and an objective of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surogate_core.bundles import TaskSpec
from surogate_core.cli.main import main
from surogate_core.plugins.registry import load_plugins
from surogate_testing import tasks

POWERED = '''
"""A task whose loss is a power of the cross-entropy, with a column of its own."""
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from annotated_types import Gt

from surogate_core import bundles, hookimpl
from surogate_core.kernels import ops


@dataclass(frozen=True)
class Options:
    power: Annotated[float, Gt(0), bundles.Flat("powered_power", essential=True)] = 1.0
    scale: Annotated[float, bundles.Flat("powered_scale")] = 1.0


def objective(options):
    def token_loss(logits_NV, labels_N, columns):
        return ops.cross_entropy(logits_NV, labels_N) ** options.power * columns["scale"]

    return bundles.Objective(name="powered", token_loss=token_loss, columns=("scale",))


def build(config, data, options):
    from surogate_core.data.sampler import PackedTask

    def scaled(batch):
        return replace(batch, columns={"scale": torch.full(batch.labels.shape, options.scale)})

    class Task(PackedTask):
        def sample(self):
            return scaled(super().sample())

        def evaluation(self):
            return None

        def steps(self):
            steps = super().steps()
            one_step = steps.next_step
            steps.next_step = lambda: [scaled(batch) for batch in one_step()]
            return steps

    return Task(config, data)


@hookimpl
def surogate_config_path():
    return "pkg://plugin_task_powered.conf"


@hookimpl
def surogate_task():
    return bundles.TaskSpec(name="powered", build=build, options=Options, objective=objective)
'''
CONF = {"task/powered.yaml": "# @package _global_\ntask: powered\n"}


@pytest.fixture
def powered(install_plugin: Any) -> None:
    install_plugin("task-powered", POWERED, conf=CONF)


def losses(records: Any, place: Path) -> list[float]:
    return [record["loss"] for record in records(place, "step_end")]


def test_options_reach_the_task_and_its_objective(
    powered: None, base: list[str], tmp_path: Path, records: Any, capsys: Any
) -> None:
    words = [word for word in base if not word.startswith("max_steps")]
    assert main(["powered", *words, "max_steps=1", f"output_dir={tmp_path}/plain"]) == 0
    assert main(["powered", *words, "max_steps=1", "powered_scale=2", f"output_dir={tmp_path}/twice"]) == 0
    (plain,), (twice,) = (losses(records, tmp_path / name) for name in ("plain", "twice"))
    assert twice == pytest.approx(2 * plain, rel=1e-6)
    config = (tmp_path / "twice" / "config.yaml").read_text()
    assert "powered_scale: 2" in config
    assert "powered_power: 1" in config
    capsys.readouterr()
    resumed = [*words, "max_steps=2", f"output_dir={tmp_path}/twice"]
    assert main(["powered", *resumed, "powered_power=2"]) == 2
    assert "powered_power" in capsys.readouterr().err
    assert main(["powered", *resumed, "powered_scale=4"]) == 0
    assert losses(records, tmp_path / "twice")[1] > 1.5 * twice


def test_mistakes_have_the_flat_key(powered: None, base: list[str], capsys: Any) -> None:
    def error(*words: str) -> str:
        assert main([*words, *base, "--cfg", "job"]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "powered_power (command line): must be a number above 0" in error("powered", "powered_power=0")
    assert "task powered has an objective of its own" in error("powered", "objective=other")
    assert "powered_power" in error("powered", "powered_powr=2")


def test_a_plan_counts_the_columns_that_the_objective_reads(powered: None, base: list[str], capsys: Any) -> None:
    assert main(["plan", *base, "task=powered"]) == 0
    assert "steps" in capsys.readouterr().out


def test_an_option_of_another_task_has_no_effect(powered: None, base: list[str], tmp_path: Path, records: Any) -> None:
    words = [word for word in base if not word.startswith("max_steps")]
    assert main(["sft", *words, "max_steps=1", "powered_scale=2", f"output_dir={tmp_path}/run"]) == 0
    (start,) = records(tmp_path / "run", "run_start")
    assert any("powered_scale=2.0 has no effect" in note for note in start["notes"])


def test_a_task_is_built_in_one_way() -> None:
    with pytest.raises(TypeError, match="either `build` or `online` must be set"):
        TaskSpec(name="neither")


def test_the_kit_passes_options(powered: None) -> None:
    spec = load_plugins().get("task", "powered")
    tasks.gives_equal_steps(spec)
    tasks.has_one_shape(spec)
