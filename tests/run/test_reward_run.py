"""Reward models in whole runs of small models: training, export, the same scores in transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from surogate_command_export.merge import merge

from surogate_core.errors import ConfigError, UserError

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
GOOD, BAD = "A number.", "I do not know at all."


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Keys of rows in which the short answer is chosen."""
    path = tmp_path_factory.mktemp("rows") / "pairs.jsonl"
    rows = [{"prompt": f"What is {i}?", "chosen": GOOD, "rejected": BAD} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("task=reward", "validation_datasets=[]", "validation_split_ratio=0.2", "eval_steps=10", "max_steps=10")
    return (*keys, f"datasets=[{{path: '{path}', type: preference}}]", "learning_rate=1e-2")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, base: list[str], run_here: RunHere, pairs: tuple[str, ...]
) -> Path:
    """A run that trained all weights."""
    place = tmp_path_factory.mktemp("reward") / "run"
    run_here(place, *base, *pairs, "lora=false")
    return place


def scores(model: Any, place: Path) -> list[float]:
    """The scores of both answers to one prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place)
    found = []
    for answer in (GOOD, BAD):
        messages = [{"role": "user", "content": "What is 7?"}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            found.append(model(ids).logits[0, 0].item())
    return found


def loaded(place: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(place, dtype=torch.float32).eval()


def test_a_reward_model_learns_and_transformers_gives_its_scores(trained: Path, records: Records) -> None:
    first, *_, last = records(trained, "eval_end")
    assert 0.6 < first["loss"] < 0.8
    assert last["loss"] < 0.1
    model = loaded(trained / "model")
    assert model.config.num_labels == 1
    good, bad = scores(model, trained / "model")
    # All pairs are alike, so the margin of one tells the loss of all.
    assert -torch.nn.functional.logsigmoid(torch.tensor(good - bad)).item() == pytest.approx(last["loss"], rel=0.3)


def test_adapters_and_head_are_trained_on_a_language_model(
    tmp_path: Path, run_here: RunHere, records: Records, pairs: tuple[str, ...], hf_dir: Path, base_on: Any
) -> None:
    """The head begins from random numbers; the adapter has it beside A and B, and the merged model too."""
    from peft import PeftModelForSequenceClassification

    run_here(tmp_path / "run", *base_on(hf_dir), *pairs, "merge_adapter=true", "lora_rank=4")
    assert records(tmp_path / "run", "eval_end")[-1]["loss"] < 0.1
    with pytest.raises(UserError, match=r"the adapter of a reward model.* Fix: repeat its command with merge"):
        merge(None, tmp_path / "run", tmp_path / "merged")
    merged = loaded(tmp_path / "run" / "model")
    whole = scores(merged, tmp_path / "run" / "model")
    assert whole[0] > whole[1] + 2
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(hf_dir, num_labels=1, dtype=torch.float32)
    adapted = PeftModelForSequenceClassification.from_pretrained(base, tmp_path / "run" / "adapter").eval()
    assert scores(adapted, tmp_path / "run" / "adapter") == pytest.approx(whole, rel=1e-3, abs=1e-3)


def test_a_reward_model_is_trained_on_and_refused_where_text_is_wanted(
    tmp_path: Path, run_here: RunHere, records: Records, pairs: tuple[str, ...], base_on: Any, trained: Path
) -> None:
    run_here(tmp_path / "more", *base_on(trained / "model"), *pairs, "lora=false", "max_steps=1", "learning_rate=1e-6")
    first, *_ = records(tmp_path / "more", "eval_end")
    assert first["loss"] == pytest.approx(records(trained, "eval_end")[-1]["loss"], rel=1e-3)
    with pytest.raises(ConfigError, match="is a reward model, whose head gives scores; task sft needs logits"):
        run_here(tmp_path / "sft", *base_on(trained / "model"), "task=sft")


def test_eval_gives_the_loss_and_the_figures_of_the_run(
    trained: Path, records: Records, capsys: pytest.CaptureFixture[str]
) -> None:
    from surogate_core.cli.main import main

    assert main(["eval", str(trained), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    last = records(trained, "eval_end")[-1]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-4)
    assert found["figures"] == pytest.approx(last["figures"], rel=1e-4)
    assert (found["perplexity"], found["accuracy"]) == (None, last["figures"]["rewards/accuracies"])
    assert main(["eval", str(trained)]) == 0
    assert "rewards/margins" in capsys.readouterr().out


def test_a_reward_model_writes_no_text(trained: Path) -> None:
    from surogate_core.cli.main import main

    assert main(["generate", str(trained / "model"), "--prompt", "Hi"]) == 2
