"""`surogate eval`: the figures of runs, of transformers' own loss, and of pairs of models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from surogate_command_eval.command import prepared_models
from transformers import AutoModelForCausalLM, AutoTokenizer

from surogate_core.cli.main import main

Run = Callable[..., int]
Call = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], data_cache: Path) -> Call:
    """The JSON of `surogate eval`."""

    def start(*words: object) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main(["eval", *map(str, words), "--json", f"data_cache_dir={data_cache}", "device=cpu"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return found

    return start


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve texts of several lengths."""
    file = tmp_path_factory.mktemp("rows") / "texts.jsonl"
    words = [
        "the",
        "chain",
        "of",
        "a",
        "bike",
        "slips",
        "when",
        "its",
        "teeth",
        "are",
        "worn",
        "and",
        "nobody",
        "oils",
        "it",
    ]
    file.write_text("".join(json.dumps({"text": " ".join(words[n:]) + "."}) + "\n" for n in range(12)))
    return file


def test_a_run_has_its_own_eval_loss(
    tmp_path: Path, hf_dir: Path, base_on: Any, run_here: Run, records: Any, call: Call
) -> None:
    keys = ("lora_rank=4", "max_steps=3", "eval_steps=3", "learning_rate=0.02", "save_steps=3")
    run_here(tmp_path / "run", *base_on(hf_dir), *keys)
    last = records(tmp_path / "run", "eval_end")[-1]
    adapted, base, checkpoint = call(tmp_path / "run", hf_dir, tmp_path / "run" / "checkpoint-3")
    assert adapted["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert adapted["label_tokens"] == last["label_tokens"]
    assert base["loss"] == pytest.approx(records(tmp_path / "run", "run_end")[0]["first_eval_loss"], rel=1e-6)
    assert base["difference"] == pytest.approx(base["loss"] - adapted["loss"])
    assert checkpoint["difference"] == 0
    assert checkpoint["difference_stderr"] == 0
    assert base["difference_stderr"] > 0
    assert not (tmp_path / "run" / "model").exists(), "nothing is written"


def test_perplexity_is_that_of_transformers(hf_dir: Path, rows: Path, call: Call) -> None:
    (found,) = call(hf_dir, f"datasets=[{{path: '{rows}', type: text}}]", "sequence_len=64")
    tokenizer, model = AutoTokenizer.from_pretrained(hf_dir), AutoModelForCausalLM.from_pretrained(hf_dir).eval()
    losses, hits, means = [], 0, []
    for line in rows.read_text().splitlines():
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        one = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        losses += one.tolist()
        means.append((one.sum().item(), len(one)))
        hits += int((logits.argmax(-1) == ids[0, 1:]).sum())
    assert found["documents"] == 12
    assert found["label_tokens"] == len(losses)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(hits / len(losses))
    sums, weights = np.array(means).T
    residuals = sums - weights * sums.sum() / weights.sum()
    assert found["stderr"] == pytest.approx(np.sqrt(12 / 11 * (residuals**2).sum()) / weights.sum(), rel=1e-4)


def _a_run(place: Path, hf_dir: Path, **keys: Any) -> Path:
    """A directory as a run of full training leaves it."""
    place.mkdir()
    (place / "model").symlink_to(hf_dir)
    (place / "config.yaml").write_text(json.dumps({"lora": False, "sequence_len": 64} | keys))
    return place


def test_named_rows_come_before_those_that_a_run_held_out(hf_dir: Path, rows: Path, tmp_path: Path, call: Call) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    keys = {"datasets": [{"path": str(rows), "type": "text"}]}
    run = _a_run(tmp_path / "run", hf_dir, **keys, validation_datasets=[{"path": str(held), "type": "text"}])
    assert call(run)[0]["documents"] == 3
    assert call(run / "model")[0]["documents"] == 3, "a part of a run has the run's rows"
    assert call(run, f"datasets=[{{path: '{rows}', type: text}}]")[0]["documents"] == 12
    assert call(run, f"validation_datasets=[{{path: '{held}', type: text}}]", f"datasets.0.path={rows}") == call(run)


def test_runs_share_rows_and_keep_their_own_precision(hf_dir: Path, rows: Path, tmp_path: Path) -> None:
    one = [{"path": str(rows), "type": "text"}]
    first = _a_run(tmp_path / "q", hf_dir, datasets=one, model_dtype="fp32", qlora_bnb=True, lora=True)
    other = [{"path": "gone.jsonl", "type": "text"}]
    second = _a_run(tmp_path / "full", hf_dir, datasets=other, model_dtype="bf16", sequence_len=32)
    names = [str(first), str(second), str(hf_dir)]
    prepared, _ = prepared_models(names, ["device=cpu"], None)
    quantised, full, base = (prepared[name].config for name in names)
    assert quantised.weight_format is not None
    assert full.weight_format is base.weight_format is None
    assert [c.model_dtype for c in (quantised, full, base)] == ["fp32", "bf16", "fp32"]
    assert {c.sequence_len for c in (quantised, full, base)} == {64}
    assert quantised.datasets == full.datasets == base.datasets


def test_a_model_with_nan_is_one_clear_line(
    model_copy: Path, rows: Path, data_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = model_copy.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    words = [f"datasets=[{{path: '{rows}', type: text}}]", "sequence_len=64", f"data_cache_dir={data_cache}"]
    capsys.readouterr()
    assert main(["eval", str(model_copy), *words, "device=cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        f"{model_copy}: the loss is not a number: model.layers.0.mlp.up_proj.weight has NaN or infinity. Fix: " in err
    )


def test_the_table_and_the_file(
    hf_dir: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data_cache: Path
) -> None:
    words = [f"datasets=[{{path: '{rows}', type: text}}]", "sequence_len=64", f"data_cache_dir={data_cache}"]
    capsys.readouterr()
    assert main(["eval", str(hf_dir), *words, "device=cpu", f"--output={tmp_path / 'found.json'}"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "loss", "±", "stderr", "perplexity", "accuracy", "documents", "label", "tokens"]
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert line.split()[:2] == [str(hf_dir), f"{found['loss']:.4f}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("MODEL",), "this is no run, so the rows to evaluate must be named. Fix: datasets=FILE.jsonl"),
        (("gone/model/dir", "datasets=a.jsonl"), "there is no such directory"),
        (("MODEL", "datasets=gone.jsonl"), "gone.jsonl"),
    ],
)
def test_bad_input_is_one_clear_message(
    words: tuple[str, ...], message: str, hf_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *(str(hf_dir) if word == "MODEL" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
