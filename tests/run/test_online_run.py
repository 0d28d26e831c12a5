"""Online tasks: steps that are made with the model while it is trained, in whole runs of a small one.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry, load_plugins

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]

ECHO = '''
"""The model is trained on its own guesses, shifted: every step depends on the weights of the step before."""
from dataclasses import dataclass
from typing import Annotated

import torch

from surogate_core import bundles, hookimpl
from surogate_core.batch import MicroBatch
from surogate_core.events import RolloutEval, Spread

WORK = []
"""Called with the number of each step before it is made."""


@dataclass(frozen=True)
class Options:
    shift: Annotated[int, bundles.Flat("echo_shift", essential=True)] = 1


class Steps:
    epoch, steps_per_epoch, engine = 0.0, float("inf"), None

    def __init__(self, context):
        self.context, self.taken = context, 0

    def attach(self, engine):
        assert self.engine is None
        self.engine = engine

    def batch(self, step):
        config, options = self.context.config, self.context.options
        n = config.per_device_train_batch_size * config.sequence_len
        ids = (torch.arange(n) * 7 + step * 11) % 1000
        return MicroBatch(
            input_ids=ids, labels=(ids + options.shift) % 1000,
            positions=torch.arange(config.sequence_len, dtype=torch.int32).repeat(config.per_device_train_batch_size),
            cu_seqlens=torch.arange(0, n + 1, config.sequence_len, dtype=torch.int32),
            max_seqlen=config.sequence_len, tokens=n, label_tokens=n,
        )

    def next_step(self):
        for work in WORK:
            work(self.taken)
        if self.context.stopped():
            raise bundles.Stopped
        batch = self.batch(self.taken)
        guesses = self.engine.logits(batch).argmax(-1)
        batch.labels[:] = (guesses + self.context.options.shift) % 1000
        with open(self.context.directory / "guesses.txt", "a") as file:
            file.write(f"{self.taken} {guesses.sum().item()}\\n")
        self.taken += 1
        return [batch] * (1 + self.taken % 2)

    def state(self):
        return {"taken": self.taken}

    def load_state(self, state):
        self.taken = state["taken"]


class Task:
    def __init__(self, context):
        self.stream = Steps(context)

    def sample(self):
        return self.stream.batch(0)

    def steps(self):
        return self.stream

    def evaluation(self):
        return None

    def evaluate(self, step):
        assert self.stream.engine is not None
        reward = {0: 0.0, 2: 0.5}.get(step, 0.25)
        return RolloutEval(step=step, tasks=1, reward=Spread(reward, 0.0, reward, reward), seconds=0.1)


@hookimpl
def surogate_config_path():
    return "pkg://plugin_task_echo.conf"


@hookimpl
def surogate_task():
    return bundles.TaskSpec(name="echo", online=Task, options=Options, planned=planned)


@hookimpl
def surogate_rollout_engine():
    return bundles.RolloutEngineSpec(name="far", open=lambda weights, settings: None, caches=False)


def planned(config, options, weights):
    layers = len(weights.plan.layers)
    return 1000 * layers, f"rollouts: {layers} layers need 2 kB, and shift is {options.shift}"
'''
KEYS = ("task=echo", "lora=true", "lora_dropout=0.1", "max_steps=4", "save_steps=2", "learning_rate=1e-2")


@pytest.fixture
def echo(install_plugin: Any) -> tuple[Any, Registry]:
    """The plugin's module, and the registry that has it."""
    install_plugin("task-echo", ECHO, conf={"task/echo.yaml": "# @package _global_\ntask: echo\n"})
    registry = load_plugins()
    registry.names("task")
    return sys.modules["plugin_task_echo"], registry


@pytest.fixture
def keys(base: list[str]) -> list[str]:
    """A run without data sets."""
    return [*(word for word in base if "datasets=" not in word and not word.startswith("max_steps")), *KEYS]


def guesses(place: Path) -> dict[str, str]:
    """Step → what the model guessed when it was made last."""
    return dict(line.split() for line in (place / "guesses.txt").read_text().splitlines())


def test_runs_are_equal_and_a_killed_one_resumes_without_losing_a_bit(
    echo: tuple[Any, Registry],
    keys: list[str],
    run_here: RunHere,
    digests: Digests,
    records: Records,
    tmp_path: Path,
) -> None:
    module, registry = echo
    whole = tmp_path / "whole"
    assert run_here(whole, *keys, registry=registry) == 0
    expected = digests(whole / "checkpoint-4"), guesses(whole)
    assert len(set(expected[1].values())) == 4
    steps = records(whole, "step_end")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0]["tokens"] == 2 * steps[1]["tokens"], "the number of micro-batches varies"
    (start,) = records(whole, "run_start")
    assert (start["train_tokens"], start["tokens_per_step"]) == (0, 0), "neither is known"
    facts = json.loads((whole / "run.json").read_text())
    assert facts["data"] is None

    def kill(step: int) -> None:
        if step == 3:
            module.WORK.clear()
            raise RuntimeError("killed")

    def interrupt(step: int) -> None:
        if step == 3:
            module.WORK.clear()
            os.kill(os.getpid(), signal.SIGTERM)

    place = tmp_path / "interrupted"
    module.WORK[:] = [kill]
    with pytest.raises(RuntimeError, match="killed"):
        run_here(place, *keys, registry=registry)
    module.WORK[:] = [interrupt]
    assert run_here(place, *keys, registry=registry) == 128 + signal.SIGTERM
    assert (place / "checkpoint-3").is_dir(), "the step before is saved"
    assert run_here(place, *keys, registry=registry) == 0
    assert (digests(place / "checkpoint-4"), guesses(place)) == expected


def test_a_signal_before_the_first_step_is_made_saves_nothing(
    echo: tuple[Any, Registry], keys: list[str], run_here: RunHere, tmp_path: Path
) -> None:
    module, registry = echo
    module.WORK[:] = [lambda step: os.kill(os.getpid(), signal.SIGINT)]
    assert run_here(tmp_path / "run", *keys, registry=registry) == 128 + signal.SIGINT
    module.WORK.clear()
    assert not [*(tmp_path / "run").glob("checkpoint-*")]


def test_the_task_evaluates_and_the_best_is_exported(
    echo: tuple[Any, Registry], keys: list[str], run_here: RunHere, records: Records, tmp_path: Path
) -> None:
    registry, place = echo[1], tmp_path / "run"
    assert run_here(place, *keys, "eval_steps=1", "load_best=true", registry=registry) == 0
    found = records(place, "rollout_eval")
    assert [(line["step"], line["reward"]["mean"]) for line in found] == [
        *((0, 0.0), (1, 0.25), (2, 0.5), (3, 0.25), (4, 0.25))
    ]
    (end,) = records(place, "run_end")
    assert (end["first_reward"], end["last_reward"], end["best_reward"], end["best_step"]) == (0.0, 0.25, 0.5, 2)
    assert end["export_step"] == 2


def test_what_such_a_task_cannot_have(
    echo: tuple[Any, Registry], keys: list[str], base: list[str], run_here: RunHere, tmp_path: Path
) -> None:
    registry = echo[1]
    for words, key in (
        (["datasets=[x.jsonl]"], "datasets"),
        (["gpus=2", "shard_weights=true"], "shard_weights"),
        (["gpus=2", "zero_level=3"], "zero_level"),
        (["gpus=2", "cpu_training=true", "lora=false", "lora_dropout=0"], "cpu_training"),
        (["epoch_adjustment=true", "max_steps=-1"], "epoch_adjustment"),
        (["max_steps=-1"], "max_steps"),
    ):
        with pytest.raises(ConfigError) as raised:
            run_here(tmp_path / "run", *keys, *words, registry=registry)
        assert raised.value.problems[0].key == key, words


def test_it_is_planned_without_data(echo: tuple[Any, Registry], keys: list[str], capsys: Any) -> None:
    assert main(["plan", *keys]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "not estimated: 4 steps, and the task makes its data while it trains" in printed
    assert "rollouts: 2 layers need 2 kB, and shift is 1" in printed
    assert main(["plan", *keys, "echo_shift=3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts_bytes"] == 2000
    assert main(["plan", *keys, "rollout=far", "--json"]) == 0, "a server keeps its own keys and values"
    assert json.loads(capsys.readouterr().out)["rollouts_bytes"] == 0
    assert main(["plan", *keys, "rollout=dedicated"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "rollouts: 2 layers need 2 kB, and shift is 1; the next GPU generates, where a copy of" in printed
    assert main(["plan", *keys, "max_steps=-1"]) == 0
    assert "the task makes its data while it trains" in capsys.readouterr().out
