"""Whole runs in this process, small enough for a second each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.plugins.registry import Registry, load_plugins

EMBEDDED = "pkg://surogate_dataset_chat/embedded"

SMALL = (
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.head_dim=16",
)
"""A Qwen3 of the smallest useful shape, from random weights."""

QUICK = (
    f"datasets=[{{path: '{EMBEDDED}/train.jsonl', type: conversation, samples: 120}}]",
    f"validation_datasets=[{{path: '{EMBEDDED}/validation.jsonl', type: conversation, samples: 12}}]",
    f"tokenizer='{EMBEDDED}/tokenizer'",
    "sequence_len=64",
    "warmup_steps=0",
    "per_device_train_batch_size=2",
    "gradient_accumulation_steps=2",
    "max_steps=6",
    "eval_steps=0",
    "device=cpu",
    "monitor=[jsonl]",
)
"""A few steps on a few rows."""

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "lora_target_modules=[all]")

KILLER = '''
import os

from surogate_core import bundles, hookimpl

class Killer:
    """Sends a signal to its own process at the first event that `at` accepts."""

    at, number = None, 0

    def on_event(self, event):
        if Killer.at is not None and Killer.at(event):
            Killer.at = None
            os.kill(os.getpid(), Killer.number)

    def state(self):
        return {}

    def load_state(self, state):
        pass

    def close(self):
        pass

@hookimpl
def surogate_monitor():
    return bundles.MonitorSpec(name="killer", build=lambda options, info: Killer())
'''
"""A monitor in a plugin; `plugin_monitor_killer.Killer` is its class."""

RunHere = Callable[..., int]


@pytest.fixture(scope="session")
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenised data of all runs of the session."""
    return tmp_path_factory.mktemp("data-cache")


@pytest.fixture(scope="session")
def installed() -> Registry:
    """The plugins of this environment."""
    return load_plugins()


@pytest.fixture(scope="session")
def base(data_cache: Path) -> list[str]:
    """Overrides of a small run from random weights."""
    return [*QUICK, *SMALL, f"data_cache_dir={data_cache}"]


@pytest.fixture
def base_on(data_cache: Path) -> Callable[[Path], list[str]]:
    """Overrides of a small run on a model directory."""
    return lambda model: [*QUICK, f"data_cache_dir={data_cache}", f"model={model}", "lora=true", "tokenizer=null"]


@pytest.fixture(scope="session")
def run_here(installed: Registry) -> RunHere:
    """Composes, checks and runs as the console script does; later overrides win. Errors are raised."""
    from surogate_core.config.resolve import load_run_config
    from surogate_core.run.job import launch

    def start(output: Path, *overrides: str, registry: Registry | None = None, config_file: Path | None = None) -> int:
        latest = {text.partition("=")[0]: text for text in overrides}
        found = registry or installed
        arguments = [*latest.values(), f"output_dir={output}"]
        return launch(load_run_config(arguments, config_file=config_file, registry=found), found)

    return start


@pytest.fixture
def records() -> Callable[..., list[dict[str, Any]]]:
    """The lines of a run's metrics.jsonl, of one event if it is named."""

    def read(output: Path, event: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    return read


@pytest.fixture
def history(records: Callable[..., list[dict[str, Any]]]) -> Callable[[Path], list[tuple[Any, ...]]]:
    """What must be the same in two equal runs: every loss, norm, rate and held-out loss, in order."""

    def read(output: Path) -> list[tuple[Any, ...]]:
        keys = ("event", "step", "epoch", "loss", "grad_norm", "lr", "tokens", "label_tokens", "total_tokens", "gap")
        chosen = ("step_end", "eval_end")
        return [tuple(line.get(key) for key in keys) for line in records(output) if line["event"] in chosen]

    return read


@pytest.fixture
def digests() -> Callable[[Path], dict[str, str]]:
    """File → digest of a directory's safetensors: equal means bit-identical weights and optimizer state."""

    def read(directory: Path) -> dict[str, str]:
        files = sorted(directory.glob("*.safetensors"))
        assert files, directory
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    return read


@pytest.fixture(scope="session")
def grpo_keys(hf_dir: Path) -> list[str]:
    """Overrides of a short run of reinforcement learning on `hf_dir`."""
    return [
        "task=grpo",
        f"model={hf_dir}",
        f"tokenizer='{EMBEDDED}/tokenizer'",
        "environment=copy",
        "sequence_len=64",
        "max_completion_length=8",
        "prompts_per_step=3",
        "num_generations=2",
        "per_device_train_batch_size=2",
        "learning_rate=0.01",
        "warmup_steps=0",
        "lora_rank=4",
        "max_steps=4",
        "save_steps=2",
        "eval_steps=2",
        "eval_environment_tasks=2",
        "device=cpu",
        "monitor=[jsonl]",
    ]
