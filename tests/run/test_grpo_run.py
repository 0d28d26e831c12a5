"""Reinforcement learning as a run: equal runs have equal bytes, wherever one was killed."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lengths import Lengths
from run_fixtures import KILLER
from surogate_task_grpo.policy_losses import POLICY_LOSSES
from surogate_task_grpo.task import open_arena

from surogate_core.cli.main import main
from surogate_core.errors import ConfigError, UserError
from surogate_core.plugins.registry import load_plugins
from surogate_reinforcement.pool import EnvironmentPool

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]


OPENED: list[EnvironmentPool] = []
"""The pools of runs with an environment in processes."""


@pytest.fixture(autouse=True, scope="module")
def _environment() -> Iterator[None]:
    def arena(context: Any, first_fault: Any) -> Any:
        chosen = context.config.environment
        if chosen.name in ("moody", "fickle", "chatty"):
            OPENED.append(open_arena(context, first_fault))
            return OPENED[-1]
        return Lengths(chosen.name, 2 if chosen.name == "reverse" else 1)

    with mock.patch("surogate_task_grpo.task.open_arena", arena):
        yield


@pytest.fixture(scope="module")
def keys(grpo_keys: list[str]) -> list[str]:
    """Overrides of a short run on a random model."""
    return grpo_keys


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, keys: list[str], run_here: RunHere) -> Path:
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("grpo") / "run"
    assert run_here(run, *keys) == 0
    return run


def result(run: Path, digests: Digests, *, adapter: str = "adapter") -> tuple[bytes, dict[str, str]]:
    """What equal runs have in common."""
    return (run / "rollouts.jsonl").read_bytes(), digests(run / adapter)


def test_a_run_records_what_it_trains_on(whole: Path, records: Records) -> None:
    lines = [json.loads(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    rollouts = records(whole, "rollouts")
    assert [one["step"] for one in rollouts] == [1, 2, 3, 4]
    assert sum(one["completions"] for one in rollouts) == len(lines)
    trained = [sum(end - start for s in one["samples"] for start, end in s["sampled"]) for one in lines]
    assert trained == [one["length"] for one in lines]
    for step in records(whole, "step_end"):
        kept = [one for one in lines if one["step"] == step["step"] and one["advantage"] is not None]
        assert step["label_tokens"] == sum(one["length"] for one in kept) > 0
    assert [one["step"] for one in records(whole, "rollout_eval")] == [0, 2, 4]


def test_two_runs_are_equal(whole: Path, keys: list[str], tmp_path: Path, run_here: RunHere, digests: Digests) -> None:
    assert run_here(tmp_path / "run", *keys) == 0
    assert result(tmp_path / "run", digests) == result(whole, digests)


def test_a_run_that_was_killed_after_a_checkpoint_writes_the_same_bytes(
    whole: Path, keys: list[str], tmp_path: Path, run_here: RunHere, digests: Digests
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    for name in ("checkpoint-4", "adapter"):
        shutil.rmtree(run / name)
    with (run / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "prom')
    assert run_here(run, *keys) == 0
    assert result(run, digests) == result(whole, digests)


PHASES = {"generate": "generating rollouts", "record": "rollouts", "evaluate": "evaluating"}


@pytest.mark.slow_cases("record", "evaluate")
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_a_run_in_any_phase_and_it_resumes(
    phase: str,
    whole: Path,
    keys: list[str],
    tmp_path: Path,
    run_here: RunHere,
    install_plugin: Callable[..., Path],
    digests: Digests,
    records: Records,
) -> None:
    install_plugin("monitor-killer", KILLER)
    registry = load_plugins()
    killer = sys.modules["plugin_monitor_killer"].Killer
    steps: list[int] = []

    def at(event: Any) -> bool:
        if event.name == "step_end":
            steps.append(event.step)
        return 2 in steps and PHASES[phase] in (event.name, getattr(event, "task", None))

    killer.at, killer.number = at, signal.SIGTERM
    run = tmp_path / "run"
    assert run_here(run, *keys, "monitor=[jsonl,killer]", registry=registry) == 143
    assert 2 <= max(step["step"] for step in records(run, "step_end")) < 4
    assert run_here(run, *keys, "monitor=[jsonl,killer]", registry=registry) == 0
    assert result(run, digests) == result(whole, digests)


VARIANTS = {
    "iterations": ("num_iterations=2", "temperature=0.8"),
    "reference": ("beta=0.1", "lora=false", "loss_type=grpo"),
    "reward": ("beta=0.1", "loss_type=rloo", "truncated_completions=penalty"),
    "turns": ("environment=reverse", "max_completion_length=50", "loss_type=gspo", "importance_correction=sequence"),
    "masked": ("mask_truncated_completions=true", "loss_type=dr_grpo", "num_generations=6", "max_completion_length=20"),
}


@pytest.mark.slow_cases("reward", "turns", "masked")
@pytest.mark.parametrize("name", VARIANTS)
def test_other_ways_to_train_resume_too(
    name: str, keys: list[str], tmp_path: Path, run_here: RunHere, digests: Digests, records: Records
) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    keys = [*keys, *VARIANTS[name], "max_steps=3", "save_steps=1", "eval_environment_tasks=0"]
    adapter = "model" if "lora=false" in keys else "adapter"
    assert run_here(run, *keys) == 0
    shutil.copytree(run, again)
    for gone in ("checkpoint-2", "checkpoint-3", adapter):
        shutil.rmtree(again / gone)
    assert run_here(again, *keys) == 0
    assert result(again, digests, adapter=adapter) == result(run, digests, adapter=adapter)
    if name == "iterations":
        assert [one["step"] for one in records(run, "rollouts")] == [1, 3]


@pytest.mark.slow_cases("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "dppo", "rloo")
@pytest.mark.parametrize("kind", [spec.name for spec in POLICY_LOSSES])
def test_ratios_begin_at_one(kind: str, keys: list[str], tmp_path: Path, run_here: RunHere, records: Records) -> None:
    """At the first iteration nothing is clipped, at the first step the model is its reference, and the rollout engine
    has the trainer's probabilities.
    """
    more = (f"loss_type={kind}", "num_iterations=2", "beta=0.1", "temperature=0.8", "learning_rate=0.05")
    assert run_here(tmp_path / "run", *keys, *more, "save_steps=0", "eval_environment_tasks=0") == 0
    figures = [step["figures"] for step in records(tmp_path / "run", "step_end")]
    assert len(figures) == 4
    assert figures[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert figures[1]["kl"] != figures[0]["kl"]
    for first in figures[::2]:
        assert first["clip_ratio/region"] == 0
    for one in figures:
        assert 0 < one["logprob_gap/mean"] <= one["logprob_gap/max"] < 1e-4
        assert one.get("importance/mean", 1.0) == pytest.approx(1.0, abs=1e-4)
        assert one.get("importance/truncated", 0.0) == 0


def test_a_checkpoint_of_another_environment_is_refused(
    whole: Path, keys: list[str], tmp_path: Path, run_here: RunHere
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(UserError, match=r"environment"):
        run_here(run, *keys, "environment=reverse", "max_steps=6")


MOODY = """
from surogate_core import bundles, hookimpl

class Moody:
    size = None

    def problem(self, number, seed):
        return bundles.EnvironmentProblem(messages=({"role": "user", "content": f"Say {number}"},))

    def start(self, problem):
        return Episode()

class Episode:
    def reply(self, text):
        self.text = text
        if len(text) % 5 == 0:
            raise RuntimeError("no")
        return bundles.Turn(done=True)

    def rewards(self):
        return {"odd": float("nan") if len(self.text) % 5 == 1 else float(len(self.text) % 2)}

@hookimpl
def surogate_environment():
    return bundles.EnvironmentSpec(name="moody", build=lambda options: Moody())
"""


def test_faults_of_an_environment_are_counted_and_the_run_goes_on(
    keys: list[str], tmp_path: Path, run_here: RunHere, install_plugin: Callable[..., Path], records: Records
) -> None:
    install_plugin("environment-moody", MOODY)
    run = tmp_path / "run"
    changed = ("environment=moody", "num_generations=6", "environment_workers=1", "eval_steps=0", "max_steps=2")
    assert run_here(run, *keys, *changed, registry=load_plugins()) == 0
    assert [worker._guardian for pool in OPENED for worker in pool._workers] == [None], "the run ends its processes"
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    faults = [one["reason"] for one in lines if one["reason"] not in ("stop", "length")]
    assert set(faults) == {"exception", "invalid"}
    assert sum(sum(one["faults"].values()) for one in records(run, "rollouts")) == len(faults)
    assert all(one["reward"] is None for one in lines if one["reason"] in faults)
    told = [one["message"] for one in records(run, "notice") if "the first fault" in one["message"]]
    assert len(told) == 1
    assert told[0].startswith(tuple(f"environment=moody: the first fault: {reason}: " for reason in faults))


CHATTY = """
import sys
from surogate_core import bundles, hookimpl

class Chatty:
    size = 4

    def problem(self, number, seed):
        return bundles.EnvironmentProblem(messages=({"role": "user", "content": f"what is {number}?"},))

    def start(self, problem):
        return Episode()

class Episode:
    def reply(self, text):
        self.text = text
        for _ in range(42 << 10):
            print("x" * 1023, file=sys.stderr)
        return bundles.Turn(done=True)

    def rewards(self):
        return {"sum": float(sum(map(ord, self.text)) % 7)}

@hookimpl
def surogate_environment():
    return bundles.EnvironmentSpec(name="chatty", build=lambda options: Chatty())
"""


@pytest.mark.slow
def test_an_environment_prints_a_gibibyte_and_a_resumed_run_is_equal(
    keys: list[str],
    tmp_path: Path,
    run_here: RunHere,
    install_plugin: Callable[..., Path],
    digests: Digests,
    records: Records,
) -> None:
    """42 MiB a reply: 26 replies are a gibibyte. Before, every reply failed after 256 MiB of a worker."""
    install_plugin("environment-chatty", CHATTY)
    whole, run = tmp_path / "whole", tmp_path / "run"
    changed = ("environment=chatty", "environment_workers=1", "environment_timeout=600", "eval_steps=0")
    assert run_here(whole, *keys, *changed, registry=load_plugins()) == 0
    assert sum(one["completions"] for one in records(whole, "rollouts")) * 42 >= 1024
    assert not any(one["faults"] for one in records(whole, "rollouts"))
    shutil.copytree(whole, run)
    for name in ("checkpoint-4", "adapter"):
        shutil.rmtree(run / name)
    assert run_here(run, *keys, *changed, registry=load_plugins()) == 0
    assert result(run, digests) == result(whole, digests)


FICKLE = """
import random
from surogate_core import bundles, hookimpl

class Fickle:
    size = 4

    def problem(self, number, seed):
        text = f"what is {random.random()}?"
        return bundles.EnvironmentProblem(messages=({"role": "user", "content": text},))

    def start(self, problem):
        raise AssertionError

@hookimpl
def surogate_environment():
    return bundles.EnvironmentSpec(name="fickle", build=lambda options: Fickle())
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_an_environment_that_is_not_as_deterministic_as_it_says_ends_the_run(
    keys: list[str], tmp_path: Path, run_here: RunHere, install_plugin: Callable[..., Path], workers: int
) -> None:
    install_plugin("environment-fickle", FICKLE)
    changed = ("environment=fickle", f"environment_workers={workers}", "eval_steps=0", "max_steps=2")
    words = r"environment=fickle says .*asked for twice, had the messages .* Fix: draw every choice from the problem's"
    with pytest.raises(UserError, match=words):
        run_here(tmp_path / "run", *keys, *changed, registry=load_plugins())


def test_the_plan_has_the_memory_of_generation(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *keys]) == 0
    assert "rollouts: 6 sequences of 64 tokens need" in capsys.readouterr().out


def test_keys_that_cannot_work_are_refused(keys: list[str], tmp_path: Path, run_here: RunHere) -> None:
    for key, words in {
        "environment=null": "environment: is not set, and task grpo needs one",
        "max_completion_length=64": "do not fit into a row of 64 tokens",
        "advantage=absent": "advantage .*: there is no such advantage",
        "reward_weights={a: 1e300}": r"reward_weights .*: has the weight 1e\+300 for a, with which sums of rewards",
    }.items():
        with pytest.raises(ConfigError, match=words):
            run_here(tmp_path / "run", *keys, key)


def test_every_command_refuses_them(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before, `surogate plan` said that such a run fits."""
    assert main(["plan", *keys, "max_completion_length=64", "mask_truncated_completions=true"]) == 2
    assert "max_completion_length (command line): a completion of 64 tokens" in capsys.readouterr().err
    wrong = ("mask_truncated_completions=true", "truncated_completions=penalty")
    assert main(["plan", *keys, *wrong]) == 2
    assert "contradicts truncated_completions=penalty" in capsys.readouterr().err


def test_eval_names_the_command_that_measures_rewards(
    keys: list[str], tmp_path: Path, run_here: RunHere, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert run_here(run, *keys, "max_steps=1", "eval_steps=0", "lora=false") == 0
    assert main(["eval", str(run)]) == 2
    assert f"task grpo has no rows to evaluate. Fix: surogate env eval {run} copy, or" in capsys.readouterr().err
