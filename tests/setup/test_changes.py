"""Resuming says what changed, and a checkpoint records what it is compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surogate_core.config.flat import flat_defaults
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.plugins import load_plugins
from surogate_core.setup.changes import changes_note, recorded

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]

DEFAULT = RunConfig()
PATH = Path("output/checkpoint-3")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"learning_rate": 1e-4}, "learning_rate: 0.0002 → 0.0001"),
        ({"lr_scheduler_type": "cosine"}, 'lr_scheduler_type: "linear" → "cosine"'),
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size: 2 → 8"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps: 4 → 1"),
        ({"lora_dropout": 0.0}, "lora_dropout: 0.05 → 0.0"),
        ({"torch_dtype": "bfloat16"}, 'torch_dtype: "auto" → "bfloat16"'),
        ({"model_dtype": "bf16"}, 'model_dtype: null → "bf16"'),
        ({"train_seed": 9}, "train_seed: 1234 → 9"),
        ({"weight_decay": 0.0}, "weight_decay: 0.1 → 0.0"),
        ({"max_grad_norm": 2.0}, "max_grad_norm: 1.0 → 2.0"),
        (
            {"validation_datasets": [{"path": "a.jsonl", "type": "text"}]},
            'validation_datasets[0].path: absent → "a.jsonl"',
        ),
        ({"recipe": replace(DEFAULT.recipe, name="fp8-hybrid")}, 'recipe.name: "bf16" → "fp8-hybrid"'),
        ({"system": "x" * 100 + "a"}, f'system: null → "{"x" * 58}…'),
    ],
)
def test_every_changed_key_is_listed(change: dict[str, Any], text: str) -> None:
    note = changes_note({"config": recorded(DEFAULT)}, replace(DEFAULT, **change), path=PATH)
    assert note is not None
    assert note.startswith(f"Changed since {PATH} was saved: ")
    assert text in note
    assert note.count("→") == text.count("→") + ("validation" in text)


def test_flat_keys_of_plugins_are_listed_by_their_names() -> None:
    registry = load_plugins()
    before = load_run_config(["normuon_beta2=0.5"], registry=registry)
    now = load_run_config(["adamw_beta1=0.8", "adamw_beta2=0.9"], registry=registry)
    saved = recorded(before)
    assert (saved["adamw_beta1"], saved["normuon_beta2"]) == (0.9, 0.5)
    flat = flat_defaults(registry)
    note = changes_note({"config": saved}, now, path=PATH, flat=flat)
    changed = "adamw_beta1: 0.9 → 0.8; adamw_beta2: 0.999 → 0.9"
    assert note == f"Changed since {PATH} was saved: {changed}; normuon_beta2: 0.5 → absent."
    # A checkpoint that has every flat key, whatever is chosen.
    assert changes_note({"config": {**flat, **recorded(now)}}, now, path=PATH, flat=flat) is None


def test_what_shapes_nothing_is_not_listed() -> None:
    saved = {"config": recorded(replace(DEFAULT, output_dir="a", run_name="b"))}
    assert changes_note(saved, replace(DEFAULT, output_dir="c", run_name="d"), path=PATH) is None
    assert changes_note({}, DEFAULT, path=PATH) is None


def test_keys_of_another_version() -> None:
    saved = recorded(DEFAULT)
    del saved["weight_decay"], saved["lora_dropout"]
    saved["old_key"] = 1
    note = changes_note({"config": saved}, replace(DEFAULT, lora_dropout=0.5), path=PATH)
    assert note == f"Changed since {PATH} was saved: lora_dropout: absent → 0.5; old_key: 1 → absent."


def test_long_values_that_look_alike_are_named() -> None:
    before, now = (replace(DEFAULT, system="x" * 100 + end) for end in "ab")
    note = changes_note({"config": recorded(before)}, now, path=PATH)
    assert note == f"Changed since {PATH} was saved: system: changed."


@pytest.mark.slow
def test_a_resumed_run_says_it_once(tmp_path: Path, base: list[str], run_here: RunHere, records: Records) -> None:
    run_here(tmp_path, *base, "max_steps=2")
    run_here(tmp_path, *base, "max_steps=3", "learning_rate=1e-3", "adamw_beta2=0.95")
    notes = records(tmp_path, "run_start")[-1]["notes"]
    (note,) = [note for note in notes if note.startswith("Changed since")]
    path = tmp_path / "checkpoint-2"
    assert note == (
        f"Changed since {path} was saved: adamw_beta2: 0.999 → 0.95; learning_rate: 0.003 → 0.001; max_steps: 2 → 3."
    )
    run_here(tmp_path, *base, "max_steps=3", "learning_rate=1e-3", "adamw_beta2=0.95")
    assert not any(n.startswith("Changed since") for n in records(tmp_path, "run_start")[-1]["notes"])
    assert json.loads((tmp_path / "checkpoint-3" / "state.json").read_text())["config"]["learning_rate"] == 1e-3
