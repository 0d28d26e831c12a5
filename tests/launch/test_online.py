"""Reinforcement learning on two processes: the same bytes as on one, also when it is resumed on another number."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_processes import ranks_of

from surogate_core.errors import ConfigError, UserError
from surogate_core.plugins.registry import Registry, load_plugins

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]

EVEN = """
import os, time
from surogate_core import bundles, hookimpl

class Even:
    size, held_out = 7, 3

    def problem(self, number, seed):
        return bundles.EnvironmentProblem(messages=({"role": "user", "content": f"Say {number}"},))

    def start(self, problem):
        return Episode()

class Episode:
    def __init__(self):
        self.texts = []

    def reply(self, text):
        self.texts.append(text)
        if len(text) % 7 == 3:
            raise RuntimeError("no")
        more = ({"role": "user", "content": "More"},)
        return bundles.Turn(messages=more, done=False) if len(self.texts) < 2 else bundles.Turn(done=True)

    def rewards(self):
        text = "".join(self.texts)
        return {"even": sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1), "long": len(text)}

class Faulty(Even):
    def start(self, problem):
        raise RuntimeError("no episode here")

def broken(options):
    if os.environ.get("RANK") != "1":
        raise ValueError("no data")
    return Even()

def ordered(options):
    for word in ("begins", "ends"):
        with open(os.environ["ORDER_OF_BUILDS"], "a") as log:
            print(os.environ["RANK"], word, file=log)
        time.sleep(0.3)
    return Even()

@hookimpl
def surogate_environment():
    specs = {
        "even": lambda options: Even(),
        "faulty": lambda options: Faulty(),
        "broken": broken,
        "ordered": ordered,
    }
    return [bundles.EnvironmentSpec(name=n, build=build, weights={"long": 0.01}) for n, build in specs.items()]
"""


@pytest.fixture
def registry(install_plugin: Callable[..., Path]) -> Registry:
    """The plugins, with an environment whose episodes fail now and then."""
    install_plugin("environment-even", EVEN)
    return load_plugins()


@pytest.fixture
def keys(grpo_keys: list[str]) -> list[str]:
    """Overrides of a short run with dropout and faulty episodes."""
    return [
        *grpo_keys,
        "environment=even",
        "environment_workers=1",
        "max_completion_length=24",
        "num_generations=4",
        "per_device_train_batch_size=1",
        "lora_dropout=0.1",
        "max_steps=2",
        "save_steps=1",
        "eval_environment_tasks=3",
    ]


def result(run: Path, digests: Digests) -> tuple[bytes, dict[str, str]]:
    """What runs of one seed have in common."""
    [place] = [place for place in (run / "adapter", run / "model") if place.is_dir()]
    return (run / "rollouts.jsonl").read_bytes(), digests(place)


def figures(records: list[dict[str, Any]]) -> list[Any]:
    """What the records of equal runs have in common."""
    timed = ("seconds", "tokens_per_second", "eta_seconds", "peak_memory_bytes", "speed_of_light", "overlapped", "time")
    return [{name: value for name, value in one.items() if name not in timed} for one in records]


@pytest.mark.slow
def test_two_ranks_write_what_one_writes(
    keys: list[str], registry: Registry, tmp_path: Path, run_here: RunHere, records: Records, digests: Digests
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_here(one, *keys, registry=registry) == 0
    assert run_here(two, *keys, "gpus=2", registry=registry) == 0
    assert result(two, digests) == result(one, digests)
    for event in ("step_end", "rollouts", "rollout_eval"):
        assert figures(records(two, event)) == figures(records(one, event)) != [], event
    assert any(line["faults"] for line in records(one, "rollouts"))
    assert json.loads((two / "run.json").read_text())["gpus"] == 2


VARIANTS = {
    "all weights": ("lora=false", "exact_reduction=true", "zero_level=1", "lora_dropout=0"),
    "shared gradients": ("lora=false", "exact_reduction=true", "zero_level=2", "lora_dropout=0", "num_iterations=2"),
    "reference": ("beta=0.1", "num_iterations=2", "temperature=0.8", "loss_type=gspo"),
    "reward": ("beta=0.1", "loss_type=rloo", "truncated_completions=penalty"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_other_ways_to_train_have_the_same_bytes_too(
    name: str, keys: list[str], registry: Registry, tmp_path: Path, run_here: RunHere, digests: Digests
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    keys = [*keys, *VARIANTS[name], "eval_environment_tasks=0"]
    assert run_here(one, *keys, registry=registry) == 0
    assert run_here(two, *keys, "gpus=2", registry=registry) == 0
    assert result(two, digests) == result(one, digests)


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_ranks(
    keys: list[str], registry: Registry, tmp_path: Path, run_here: RunHere, digests: Digests
) -> None:
    keys = [*keys, "max_steps=3", "eval_environment_tasks=0", "num_iterations=2"]
    whole = tmp_path / "whole"
    assert run_here(whole, *keys, "gpus=2", registry=registry) == 0
    for gpus in (1, 2, 4):
        run = shutil.copytree(whole, tmp_path / f"resumed-{gpus}")
        for name in ("checkpoint-2", "checkpoint-3", "adapter"):
            shutil.rmtree(run / name)
        with (run / "rollouts.jsonl").open("ab") as file:
            file.write(b'{"step": 9, "prom')
        assert run_here(run, *keys, f"gpus={gpus}", registry=registry) == 0
        assert result(run, digests) == result(whole, digests), gpus


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_and_the_run_resumes(
    keys: list[str], tmp_path: Path, run_here: RunHere, records: Records, digests: Digests
) -> None:
    keys = [*keys, "environment=copy", "max_steps=6", "save_steps=0", "eval_steps=0", "num_generations=8"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert run_here(whole, *keys) == 0
    latest = {text.partition("=")[0]: text for text in keys}
    command = [sys.executable, "-m", "surogate_core", *latest.values(), "gpus=2", f"output_dir={run}"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True)
    file, end = run / "metrics.jsonl", time.monotonic() + 120
    while not file.is_file() or file.read_text().count('"step_end"') < 2:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    assert process.wait(timeout=120) == 143
    stopped = records(run, "run_end")[-1]
    assert (stopped["reason"], (run / f"checkpoint-{stopped['step']}").is_dir()) == ("signal", True)
    assert 2 <= stopped["step"] < 6
    assert run_here(run, *keys, "gpus=2") == 0
    assert result(run, digests) == result(whole, digests)


@pytest.mark.slow
def test_an_environment_that_fails_on_one_rank_ends_the_run_with_one_line(
    keys: list[str], registry: Registry, tmp_path: Path, run_here: RunHere, records: Records
) -> None:
    message = "environment=broken: it cannot be built: exception: ValueError: no data"
    with pytest.raises(UserError, match=message):
        run_here(tmp_path / "run", *keys, "environment=broken", "gpus=2", registry=registry)
    # Episodes that fail on every rank bring no reward, which is an error of all ranks.
    with pytest.raises(UserError, match=r"^None of .* has a reward: exception"):
        run_here(tmp_path / "faults", *keys, "environment=faulty", "gpus=2", registry=registry)
    (end,) = records(tmp_path / "faults", "run_end")
    assert end["reason"] == "failed"


@pytest.mark.slow
def test_the_first_rank_builds_the_environment_before_the_others(
    keys: list[str], registry: Registry, tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "order"
    monkeypatch.setenv("ORDER_OF_BUILDS", str(log))
    words = ["environment=ordered", "environment_workers=1", "max_steps=1", "gpus=2"]
    assert run_here(tmp_path / "run", *keys, *words, registry=registry) == 0
    assert log.read_text().splitlines() == ["0 begins", "0 ends", "1 begins", "1 ends"]


def test_what_several_ranks_cannot_do_is_refused(
    keys: list[str], registry: Registry, tmp_path: Path, run_here: RunHere
) -> None:
    for words, key in (
        (["rollout=vllm"], "rollout"),
        (["shard_weights=true"], "shard_weights"),
        (["context_parallel_size=2"], "context_parallel_size"),
        (["ep_size=2"], "ep_size"),
        (["beta=0.1", "lora=false", "lora_dropout=0"], "beta"),
    ):
        with pytest.raises(ConfigError) as raised:
            run_here(tmp_path / "run", *keys, "gpus=2", *words, registry=registry)
        assert [problem.key for problem in raised.value.problems] == [key], words
