"""Completions that are made while the model is trained on those before: which weights sample, and that it repeats."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lengths import Lengths
from run_fixtures import KILLER

from surogate_core.bundles import Fault
from surogate_core.engine.engine import Engine
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry, load_plugins

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]

APART = """
import hashlib
import threading
import time
from surogate_core import bundles, hookimpl

class Apart:
    log = []
    fails_at = None

    def __init__(self, weights, settings):
        self.weights, self.copied = weights, None

    def _digest(self):
        made = hashlib.blake2b(digest_size=8)
        for _, tensor in self.weights.parameters.adapter_tensors():
            made.update(tensor.detach().float().numpy().tobytes())
        return made.digest()

    def forget(self):
        self.copied = None

    def copy_weights(self, documents):
        assert documents
        self.copied = self._digest()

    def close(self):
        Apart.log.append(("closed", ""))

    def generate(self, requests, *, on_token=None):
        thread = threading.current_thread().name.partition("_")[0]
        if thread == "rollouts":
            assert self.copied is not None
            time.sleep(0.05)  # the step beside it changes the weights meanwhile
        weights = self.copied or self._digest()
        Apart.log.append((thread, weights.hex()))
        if len(Apart.log) == Apart.fails_at:
            raise RuntimeError("the server is gone")
        return [self._completion(number, request, weights, on_token) for number, request in enumerate(requests)]

    def _completion(self, number, request, weights, on_token):
        key = repr((request.prompt, request.number, request.sample)).encode()
        chosen = hashlib.blake2b(weights + key).digest()[: request.max_new_tokens]
        ids = tuple(70 + byte % 26 for byte in chosen)
        for token in ids:
            on_token(number, token)
        return bundles.Completion(ids=ids, logprobs=(-6.9,) * len(ids), reason="length")

@hookimpl
def surogate_rollout_engine():
    return bundles.RolloutEngineSpec(name="apart", open=Apart, caches=False, apart=True)
"""


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    with mock.patch("surogate_task_grpo.task.open_arena", side_effect=lambda context, first_fault: Lengths("copy", 1)):
        yield


@pytest.fixture
def registry(install_plugin: Callable[..., Path]) -> Registry:
    """The plugins, with an engine whose completions depend on the weights that it copied."""
    install_plugin("monitor-killer", KILLER)
    install_plugin("rollout-apart", APART)
    return load_plugins()


@pytest.fixture
def engine(registry: Registry) -> Any:
    """The class of the engine: `log` has (thread, digest of the weights) of each call."""
    return sys.modules["plugin_rollout_apart"].Apart


@pytest.fixture
def keys(grpo_keys: list[str]) -> list[str]:
    return [*grpo_keys, "rollout=apart", "max_staleness=1", "max_steps=5"]


@pytest.fixture
def run(keys: list[str], run_here: RunHere, registry: Registry) -> Callable[..., int]:
    """Runs into a directory, with the keys and more."""
    return lambda output, *more: run_here(output, *keys, *more, registry=registry)


def result(run: Path, digests: Digests) -> tuple[bytes, dict[str, str]]:
    return (run / "rollouts.jsonl").read_bytes(), digests(run / "adapter")


def test_a_fault_of_a_generation_ahead_is_told_when_it_is_taken(
    tmp_path: Path, run: Callable[..., int], records: Records
) -> None:
    told: list[str] = []

    class Late(Lengths):
        def reply(self, replies: Any) -> Any:
            if threading.current_thread().name.startswith("rollouts") and not told:
                told.append("")
                self.first_fault(Fault(reason="timeout", detail="reply took more than 10 s"))
            return super().reply(replies)

    def arena(context: Any, first_fault: Any) -> Any:
        found = Late("copy", 1)
        found.first_fault, found.name = first_fault, "copy"
        return found

    with mock.patch("surogate_task_grpo.task.open_arena", arena):
        assert run(tmp_path / "run", "eval_environment_tasks=0", "max_refills=0") == 0
    (notice,) = [one for one in records(tmp_path / "run", "notice") if "the first fault" in one["message"]]
    assert notice["message"].startswith("environment=copy: the first fault: timeout: reply took more than 10 s.")


def test_each_generation_is_sampled_with_the_weights_of_one_step_before(
    tmp_path: Path, run: Callable[..., int], engine: Any, records: Records
) -> None:
    assert run(tmp_path / "run", "eval_environment_tasks=0", "max_refills=0") == 0
    assert engine.log.pop() == ("closed", "")
    threads, weights = zip(*engine.log, strict=True)
    assert threads == ("MainThread", *["rollouts"] * 4), "none is made that no step trains on"
    assert weights[0] == weights[1], "the first step trains while the second generation is made"
    assert len({*weights}) == 4
    found = records(tmp_path / "run", "rollouts")
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5]
    assert not found[0]["overlapped"]
    for one in found[1:]:
        assert one["overlapped"]["generate"] >= 0.05
        assert "wait" in one["seconds"]
        assert "generate" not in one["seconds"]


def test_a_step_runs_while_the_next_generation_is_made(
    tmp_path: Path, run: Callable[..., int], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    train, copy, generate = Engine.train_step, engine.copy_weights, engine.generate

    def copied(self: Any, documents: Any) -> None:
        begun.clear()
        copy(self, documents)

    def trained(self: Engine, *given: Any, **named: Any) -> Any:
        begun.set()
        return train(self, *given, **named)

    def generated(self: Any, *given: Any, **named: Any) -> Any:
        if threading.current_thread().name.startswith("rollouts"):
            assert begun.wait(20), "the step waits for it"
        return generate(self, *given, **named)

    monkeypatch.setattr(Engine, "train_step", trained)
    monkeypatch.setattr(engine, "copy_weights", copied)
    monkeypatch.setattr(engine, "generate", generated)
    assert run(tmp_path / "run", "eval_environment_tasks=0", "max_steps=3") == 0


@pytest.mark.slow
def test_runs_are_equal_also_one_that_was_killed(
    tmp_path: Path, run: Callable[..., int], digests: Digests, records: Records
) -> None:
    assert run(tmp_path / "whole") == 0
    assert run(tmp_path / "again") == 0
    whole = result(tmp_path / "whole", digests)
    assert result(tmp_path / "again", digests) == whole
    killed = shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for name in ("checkpoint-4", "checkpoint-5", "adapter"):
        shutil.rmtree(killed / name)
    assert run(killed) == 0
    assert result(killed, digests) == whole
    for name in ("rollouts", "rollout_samples"):
        assert [one["step"] for one in records(killed, name)] == [1, 2, 3, 4, 5]
    first, second = (records(tmp_path / name, "rollouts") for name in ("whole", "killed"))
    assert [one["reward"] for one in first] == [one["reward"] for one in second]


@pytest.mark.slow
def test_several_steps_on_a_generation(tmp_path: Path, run: Callable[..., int], digests: Digests) -> None:
    more = ("num_iterations=2", "save_steps=1", "max_steps=6", "beta=0.1")
    assert run(tmp_path / "whole", *more) == 0
    for step in (1, 2, 3):
        killed = shutil.copytree(tmp_path / "whole", tmp_path / f"killed-{step}")
        for later in (*(f"checkpoint-{n}" for n in range(step + 1, 7)), "adapter"):
            shutil.rmtree(killed / later)
        assert run(killed, *more) == 0
        assert result(killed, digests) == result(tmp_path / "whole", digests)


def test_a_signal_waits_for_the_generation_that_is_being_made(
    tmp_path: Path, run: Callable[..., int], registry: Registry, digests: Digests
) -> None:
    assert run(tmp_path / "whole") == 0
    killer = sys.modules["plugin_monitor_killer"].Killer
    killer.at, killer.number = lambda event: event.name == "step_end" and event.step == 3, signal.SIGTERM
    assert run(tmp_path / "ended", "monitor=[jsonl,killer]") == 143
    killer.at = lambda event: False
    assert run(tmp_path / "ended", "monitor=[jsonl,killer]") == 0
    assert result(tmp_path / "ended", digests) == result(tmp_path / "whole", digests)


@pytest.mark.slow
def test_a_generation_that_fails_costs_no_checkpoint(tmp_path: Path, run: Callable[..., int], engine: Any) -> None:
    engine.fails_at = 4
    with pytest.raises(RuntimeError, match="the server is gone"):
        run(tmp_path / "run", "eval_environment_tasks=0", "max_refills=0", "save_steps=3")
    assert (tmp_path / "run" / "checkpoint-3").is_dir()
    engine.fails_at = None
    assert run(tmp_path / "run", "eval_environment_tasks=0", "max_refills=0", "save_steps=3") == 0


def test_what_needs_the_device_of_the_training_is_refused(tmp_path: Path, run: Callable[..., int]) -> None:
    for key, words in {
        "rollout=native": "max_staleness.*: is 1, and rollout=native samples with the weights that are being trained",
        "reward_model=judge": "reward_model scores completions on the device that trains",
        "loss_type=rloo": "rloo with beta needs the reference",
    }.items():
        with pytest.raises(ConfigError, match=words):
            run(tmp_path / "run", key, *(("beta=0.1",) if "rloo" in key else ()))
