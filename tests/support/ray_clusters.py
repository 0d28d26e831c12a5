"""Clusters of two fake machines on this one, and runs on them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rank_processes import workers

EMBEDDED = "pkg://surogate_dataset_chat/embedded"

KEYS = (
    f"datasets=[{{path: '{EMBEDDED}/train.jsonl', type: conversation, samples: 120}}]",
    f"tokenizer='{EMBEDDED}/tokenizer'",
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.head_dim=16",
    "sequence_len=64",
    "warmup_steps=0",
    "per_device_train_batch_size=2",
    "gradient_accumulation_steps=2",
    "eval_steps=0",
    "save_steps=4",
    "device=cpu",
    "lora_rank=4",
)
"""A run of seconds on a model from random weights, with two micro-batches in a step on two processes."""


def worker_processes(directory: Path) -> dict[int, tuple[int, int]]:
    """Rank → (its process, that of its supervisor), of the run that was started in the directory."""
    here = directory.resolve()
    return {
        rank: (process, supervisor)
        for rank, process, supervisor in workers()
        if Path(f"/proc/{process}/cwd").resolve() == here
    }


@dataclass(slots=True)
class Run:
    """`surogate sft` in a directory of its own."""

    process: subprocess.Popen[str]
    place: Path
    output: Path

    def wait_for_ranks(self, count: int) -> dict[int, tuple[int, int]]:
        """Wait until the ranks have started; their processes."""
        until = time.monotonic() + 120
        while len(found := worker_processes(self.place)) < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.05)
        return found

    def wait_for_steps(self, count: int) -> dict[int, tuple[int, int]]:
        """Wait until this number of steps is recorded; the processes of the ranks."""
        file, until = self.output / "metrics.jsonl", time.monotonic() + 120
        while not file.is_file() or file.read_text().count('"step_end"') < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.05)
        return worker_processes(self.place)

    def end(self) -> tuple[int, str]:
        """The exit code and all output; no rank is left."""
        output, _ = self.process.communicate(timeout=150)
        assert not worker_processes(self.place)
        return self.process.returncode, output

    def records(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == event]

    def history(self) -> list[tuple[Any, ...]]:
        """What is the same in equal runs. A step that a restart repeats counts as its last repetition."""
        keys = ("step", "loss", "grad_norm", "lr", "tokens", "total_tokens")
        steps = {line["step"]: tuple(line[key] for key in keys) for line in self.records("step_end")}
        return [steps[step] for step in sorted(steps)]

    def weights(self) -> dict[str, str]:
        """File of the last checkpoint → digest: weights and optimizer state."""
        checkpoint = max(self.output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        files = sorted(checkpoint.glob("*.safetensors"))
        assert files, checkpoint
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@dataclass(slots=True)
class Fake:
    """A cluster of fake machines of one CPU each: what one run reserves, another one has to wait for."""

    cluster: Any
    machines: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **environment: str) -> Any:
        """Another machine."""
        self.machines.append(self.cluster.add_node(num_cpus=1, env_vars=environment or None))
        return self.machines[-1]

    def lose(self, machine: Any) -> None:
        """The machine's Ray is killed, as if the machine was."""
        self.machines.remove(machine)
        self.cluster.remove_node(machine, allow_graceful=False)

    def lose_head(self) -> None:
        """The process by which Ray's head keeps the cluster together is killed."""
        self.cluster.head_node.all_processes["gcs_server"][0].process.kill()

    def wait_for_supervisor(self, machine: Any) -> None:
        """Wait until the run's supervisor on the machine is a process, which is before any rank."""
        (raylet,) = [item.process.pid for item in machine.all_processes["raylet"]]
        until = time.monotonic() + 120
        while not any(title.startswith("ray::Node") for title in _titles(raylet)):
            assert time.monotonic() < until
            time.sleep(0.02)

    def machine_of(self, supervisor: int) -> Any:
        """The machine that started a process."""
        status = Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()
        parent = int(status[1])
        (found,) = [m for m in self.machines if any(p.process.pid == parent for p in m.all_processes["raylet"])]
        return found


def _titles(parent: int) -> list[str]:
    """The command lines of the processes that a process has started."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == parent:
                found.append((directory / "cmdline").read_text())
    return found


def make_cluster(environments: Sequence[dict[str, str]] = ({}, {})) -> Fake:
    """A cluster with a machine for each environment; the test is skipped without Ray."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("the package ray is not installed")
    from ray.cluster_utils import Cluster

    first, *others = environments
    head = {"num_cpus": 1, "include_dashboard": False, "env_vars": first or None}
    fake = Fake(Cluster(initialize_head=True, head_node_args=head))
    fake.machines.append(fake.cluster.head_node)
    for environment in others:
        fake.add(**environment)
    return fake
