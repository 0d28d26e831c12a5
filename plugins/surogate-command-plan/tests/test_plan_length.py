"""How many steps `surogate plan` expects of data that it does not read: by the size, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from surogate_command_plan import length
from surogate_command_plan.length import BYTES_PER_TOKEN, Length, length_of

from surogate_core.plugin import load_run_config
from surogate_core.service.plugins import Registry

TOKENS = 2**20
"""What the text of `big` is taken for."""

Plan = Callable[..., Length]


@pytest.fixture
def plan(installed: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The length for entries and keys; no data is small enough to be read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(length, "SMALL", 2**20)
    config = load_run_config([], registry=installed)
    keys: dict[str, Any] = {"sequence_len": 1024, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    keys |= {"num_epochs": 1, "max_steps": -1, "validation_split_ratio": 0.0, "validation_datasets": []}

    def found(*entries: dict[str, Any], **more: Any) -> Length:
        changed = replace(config, **(keys | {"datasets": list(entries)} | more))
        return length_of(changed, installed, None)  # type: ignore[arg-type]

    return found


def big(name: str) -> dict[str, Any]:
    Path(name).parent.mkdir(exist_ok=True)
    with Path(name).open("wb") as file:
        file.truncate(int(TOKENS * BYTES_PER_TOKEN))
    return {"path": name}


def test_text_is_estimated_by_its_size(plan: Plan) -> None:
    found = plan(big("a.jsonl"))
    assert (found.steps, found.estimated) == (1024, True)
    assert plan(big("a.jsonl") | {"split": "train"}).steps == 1024


@pytest.mark.parametrize("suffix", ["parquet", "jsonl.gz", "jsonl.zst", "json.xz", "csv.bz2"])
def test_of_a_compressed_file_no_number_is_made_up(plan: Plan, suffix: str) -> None:
    found = plan(big("a.jsonl"), big(f"b.{suffix}"))
    assert (found.steps, found.estimated) == (None, False)
    assert "not known without reading the data" in found.data
    assert plan(big(f"b.{suffix}"), max_steps=7).steps == 7


@pytest.mark.parametrize("part", [{"samples": 10}, {"split": "test"}, {"subset": "en"}])
def test_of_a_part_no_number_is_made_up(plan: Plan, part: dict[str, Any]) -> None:
    big("d/a.jsonl")
    assert plan({"path": "d", **part}).steps is None


def test_the_weight_counts_and_only_data_of_the_split(plan: Plan) -> None:
    assert plan(big("a.jsonl") | {"weight": 2.0}, big("b.jsonl") | {"weight": 0.5}).steps == 2560
    for name in ("a.jsonl", "test.jsonl", "picture.png", ".hidden.jsonl", "README.md", "model.safetensors"):
        big(f"d/{name}")
    assert plan({"path": "d"}).steps == 1024


def test_the_held_out_share_is_taken_only_without_validation_data(plan: Plan) -> None:
    held = {"validation_split_ratio": 0.25}
    assert plan(big("a.jsonl"), **held).steps == 768
    assert plan(big("a.jsonl"), validation_datasets=[{"path": "v.jsonl"}], **held).steps == 1024
