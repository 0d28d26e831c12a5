"""A trained reward model as a reward of reinforcement learning, in whole runs of small models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_fixtures import EMBEDDED

from surogate_core.cli.main import main
from surogate_core.errors import ConfigError, UserError

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]
END, NEWLINE = 2, 201
"""What the embedded template writes behind a reply."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Keys of a reward model that learns to prefer short answers."""
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    rows = [{"prompt": f"Copy {i}", "chosen": "A number.", "rejected": "I do not know at all."} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["task=reward", "validation_datasets=[]", f"datasets=[{{path: '{path}', type: preference}}]", "max_steps=2"]


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, base: list[str], run_here: RunHere, pairs: list[str]) -> Path:
    """A run that trained all weights of a reward model."""
    place = tmp_path_factory.mktemp("reward") / "run"
    run_here(place, *base, *pairs, "lora=false", "learning_rate=1e-2")
    return place


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Copy {i}"}) + "\n" for i in range(12)))
    return path


@pytest.fixture(scope="module")
def keys(hf_dir: Path, reward: Path) -> list[str]:
    """Overrides of a short run on a random model."""
    return [
        "task=grpo",
        f"model={hf_dir}",
        f"tokenizer='{EMBEDDED}/tokenizer'",
        "environment=copy",
        "environment_workers=1",
        "sequence_len=64",
        "max_completion_length=8",
        "prompts_per_step=3",
        "num_generations=2",
        "per_device_train_batch_size=2",
        "learning_rate=0.01",
        "warmup_steps=0",
        "lora_rank=4",
        "max_steps=2",
        "save_steps=1",
        "eval_steps=2",
        "eval_environment_tasks=2",
        "device=cpu",
        "monitor=[jsonl]",
        f"reward_model={reward}",
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, keys: list[str], run_here: RunHere) -> Path:
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("grpo") / "run"
    assert run_here(run, *keys) == 0
    return run


def rollouts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def of_transformers(model: Path, ids: list[int]) -> float:
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        return float(loaded(torch.tensor([ids])).logits[0, 0])


def test_scores_are_those_of_transformers(whole: Path, reward: Path, records: Records) -> None:
    lines = rollouts(whole)
    assert len(lines) >= 12
    for line in lines:
        ids = line["samples"][-1]["ids"]
        whole_ids = [*(ids[:-1] if line["reason"] == "stop" else ids), END, NEWLINE]
        assert line["rewards"]["reward_model"] == pytest.approx(of_transformers(reward / "model", whole_ids), abs=1e-5)
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()), abs=1e-9)
    assert len({line["rewards"]["reward_model"] for line in lines}) > 3
    for event in ("rollouts", "rollout_eval"):
        assert all("reward_model" in one["rewards"] for one in records(whole, event))
    assert all("reward_model" in one["seconds"] for one in records(whole, "rollouts"))
