"""The embedded example: what its generator makes, learnable, and held out honestly."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import surogate_dataset_chat as plugin
import yaml

from surogate_core.service.config import RunConfig
from surogate_core.service.data import check_vocabulary, prepare

ROOT = Path(plugin.__file__).parent


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """scripts/make_embedded_data.py as a module."""
    path = Path(__file__).resolve().parents[1] / "scripts" / "make_embedded_data.py"
    spec = importlib.util.spec_from_file_location("make_embedded_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def embedded_rows(name: str) -> list[Any]:
    return [json.loads(line) for line in (ROOT / "embedded" / name).read_text().splitlines()]


def test_the_shipped_data_are_what_the_generator_makes(generator: Any) -> None:
    train, validation = generator.make_conversations()
    assert (ROOT / "embedded/train.jsonl").read_text() == generator.render_jsonl(train)
    assert (ROOT / "embedded/validation.jsonl").read_text() == generator.render_jsonl(validation)
    assert (ROOT / "embedded/tokenizer/tokenizer_config.json").read_text() == generator.tokenizer_config()


def test_the_shipped_tokenizer_is_what_the_generator_trains(generator: Any) -> None:
    made = json.loads(generator.train_tokenizer(generator.make_conversations()[0]))
    shipped = json.loads((ROOT / "embedded/tokenizer/tokenizer.json").read_text())
    assert made["model"]["vocab"] == shipped["model"]["vocab"]


def test_no_held_out_question_is_in_the_training_part(generator: Any) -> None:
    train, validation = (embedded_rows(name) for name in ("train.jsonl", "validation.jsonl"))
    asked = {generator.question(row["messages"]) for row in train}
    held_out = {generator.question(row["messages"]) for row in validation}
    assert len(asked) == len(train) == generator.TRAIN_ROWS
    assert len(held_out) == len(validation) == generator.VALIDATION_ROWS
    assert not asked & held_out


def test_the_data_are_small_and_varied() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "embedded").rglob("*") if path.is_file()]
    assert sum(sizes) < 600_000
    rows = embedded_rows("train.jsonl")
    assert {len(row["messages"]) for row in rows} >= {2, 3, 4, 5, 6}
    assert {m["role"] for row in rows for m in row["messages"]} == {"system", "user", "assistant"}


def test_the_embedded_config_prepares(tokenizer: Any, tmp_path: Path) -> None:
    node = yaml.safe_load((ROOT / "conf/dataset/embedded.yaml").read_text())
    config = RunConfig(**node, sequence_len=256, data_cache_dir=str(tmp_path))
    data = prepare(config, tokenizer, {f.name: f for f in plugin.surogate_dataset()})
    assert data.eval is not None
    assert data.report.warnings == ()
    assert (data.report.bad_row_count, data.report.train.deleted) == (0, 0)
    assert 0.2 < data.report.trained_share < 0.6
    assert data.train.fill > 0.95
    check_vocabulary(tokenizer, 1024)


def test_the_tokenizer_is_a_chat_tokenizer(tokenizer: Any) -> None:
    assert len(tokenizer) == 1024
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = "Köln 漢字 😀\n 12345 don't"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("12 + 345")["input_ids"] == [
        tokenizer.convert_tokens_to_ids(t) for t in ("1", "2", "Ġ+", "Ġ", "3", "4", "5")
    ]
