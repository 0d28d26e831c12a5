"""The result of a run: its best step, the weights that are exported, and the commands for what comes next."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import TOKEN, FakeHub
from huggingface_hub import constants
from safetensors.torch import load_file

from surogate_core.cli.main import main
from surogate_core.engine.engine import Engine
from surogate_core.errors import ConfigError

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the losses that the evaluations of a run find."""

    def scripted(*losses: float) -> None:
        left: Iterator[float] = iter(losses)
        monkeypatch.setattr(Engine, "evaluate", lambda self, batches: (next(left), 9))

    return scripted


def test_the_best_weights_are_kept_and_exported(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, held_out: Callable[..., None]
) -> None:
    keys = [*base, "lora=true", "eval_steps=1", "save_steps=1", "save_total_limit=1", "learning_rate=1e-2"]
    held_out(9.0, 5.0, 3.0, 4.0, 6.0, 7.0, 8.0)
    assert run_here(tmp_path, *keys, "load_best=true") == 0
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    best, last = (load_file(tmp_path / f"checkpoint-{step}/trainable.safetensors") for step in (2, 6))
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in exported} == set(best)
    assert all(torch.equal(exported[f"base_model.model.{name}"], tensor) for name, tensor in best.items())
    assert any(not torch.equal(best[name], last[name]) for name in best)
    end = records(tmp_path, "run_end")[-1]
    names = ("best_step", "best_eval_loss", "export_step", "last_eval_step", "last_eval_loss")
    assert [end[name] for name in names] == [2, 3.0, 2, 6, 8.0]
    result = json.loads((tmp_path / "run.json").read_text())["result"]
    assert [result[name] for name in names] == [2, 3.0, 2, 6, 8.0]
    card = (tmp_path / "adapter/README.md").read_text()
    assert "| eval loss | 9.0000 → 8.0000 at step 6, the best 3.0000 at step 2 |" in card
    assert "| weights of step | 2 |" in card
    report = (tmp_path / "report.md").read_text()
    assert "lowest 3.0000 at step 2" in report
    assert "adapter, the weights of step 2" in report
    # A run that goes on does so from its last step, and still knows the best.
    held_out(7.0, 6.0)
    assert run_here(tmp_path, *keys, "load_best=true", "max_steps=8") == 0
    assert records(tmp_path, "run_start")[-1]["start_step"] == 6
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-8"}
    assert records(tmp_path, "run_end")[-1]["export_step"] == 2


@pytest.mark.slow
def test_without_load_best_the_last_weights_are_exported_and_a_lost_best_is_said(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, held_out: Callable[..., None]
) -> None:
    keys = [*base, "lora=true", "eval_steps=1", "save_steps=0", "max_steps=3"]
    held_out(9.0, 3.0, 4.0, 5.0)
    assert run_here(tmp_path, *keys) == 0
    assert records(tmp_path, "run_end")[-1]["export_step"] == 3
    assert records(tmp_path, "run_end")[-1]["best_step"] == 1
    # Its weights were not saved, so that they cannot be exported now.
    assert run_here(tmp_path, *keys, "load_best=true") == 0
    assert records(tmp_path, "run_end")[-1]["export_step"] == 3
    (warning,) = [n["message"] for n in records(tmp_path, "notice") if n["message"].startswith("load_best")]
    assert "the weights of step 3 are exported" in warning


def test_load_best_needs_held_out_data(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    with pytest.raises(ConfigError, match=r"load_best: there is no held-out data.*Fix: validation_split_ratio=0.1"):
        run_here(tmp_path, *base, "validation_datasets=[]", "validation_split_ratio=0", "load_best=true")


def test_about_ten_evaluations_by_default(tmp_path: Path, base: list[str], run_here: RunHere, records: Records) -> None:
    run_here(tmp_path, *base, "max_steps=25", "eval_steps=auto", "save_steps=0")
    assert [line["step"] for line in records(tmp_path, "eval_end")] == [*range(0, 25, 3), 25]


def test_every_next_command_works(
    tmp_path: Path,
    base_on: Callable[[Path], list[str]],
    hf_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sft", *base_on(hf_dir), "monitor=[console,jsonl]", "max_steps=1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    block = printed[printed.index("Next:") + 1 :]
    commands = [line.split("  ")[-1].strip() for line in block if line.startswith("  ") and line.count("  ") > 1]
    assert [shlex.split(command)[:2] for command in commands] == [
        ["surogate", "merge"],
        ["surogate", "chat"],
        ["surogate", "report"],
        ["surogate", "export"],
        ["vllm", "serve"],
    ]
    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for command in commands:
            program, *words = shlex.split(command.replace("USER/NAME", "me/tiny"))
            if program == "surogate":
                monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
                assert main(words) == 0, command
            else:
                assert (tmp_path / words[1] / "config.json").is_file(), "vLLM would be given no model"
        # The base is a directory, which nobody else has: the merged model is sent.
        assert "model.safetensors" in hub.repositories["me/tiny"]["files"]
