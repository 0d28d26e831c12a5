"""The result of a run: its best step, the weights that are exported, and the commands for what comes next."""

from __future__ import annotations

import io
import json
import shlex
import shutil
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
from surogate_core.files.tensorfile import file_digest

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


@pytest.mark.parametrize("lora", [True, False])
def test_a_run_that_no_step_made_better_keeps_its_start_with_load_best(
    lora: bool, tmp_path: Path, base: list[str], run_here: RunHere, records: Records, held_out: Callable[..., None]
) -> None:
    keys = [*base, f"lora={lora}", "eval_steps=1", "save_steps=1", "save_total_limit=1", "learning_rate=1e-2"]
    held_out(3.0, 5.0, 4.0)
    assert run_here(tmp_path, *keys, "max_steps=2", "load_best=true") == 0
    assert {p.name for p in tmp_path.glob("checkpoint-*")} == {"checkpoint-0", "checkpoint-2"}
    end = records(tmp_path, "run_end")[-1]
    names = ("best_step", "best_eval_loss", "export_step", "last_eval_loss")
    assert [end[name] for name in names] == [0, 3.0, 0, 4.0]
    if lora:
        exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
        assert all(not tensor.any() for name, tensor in exported.items() if ".lora_B." in name)
    else:
        exported, start = (
            load_file(tmp_path / name) for name in ("model/model.safetensors", "checkpoint-0/trainable.safetensors")
        )
        assert all(torch.equal(exported[name], start[name].to(exported[name].dtype)) for name in exported)
    # A run that goes on keeps the start until a step is better.
    held_out(6.0, 2.0)
    assert run_here(tmp_path, *keys, "load_best=true", "max_steps=3") == 0
    assert records(tmp_path, "run_end")[-1]["export_step"] == 0
    assert run_here(tmp_path, *keys, "load_best=true", "max_steps=4") == 0
    assert records(tmp_path, "run_end")[-1]["export_step"] == 4


def test_a_run_that_got_worse_says_so_at_its_end(
    tmp_path: Path,
    base: list[str],
    run_here: RunHere,
    held_out: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    held_out(3.0, 5.0, 4.0)
    keys = [*base, "lora=false", "eval_steps=1", "save_steps=0", "max_steps=2", "monitor=[console,jsonl]"]
    assert run_here(tmp_path, *keys) == 0
    said = capsys.readouterr().out
    assert "No step was better than the start: the eval loss was 3.0000 before the first step." in said
    assert "Best eval loss" not in said
    assert "publish" not in said
    card = (tmp_path / "model/README.md").read_text()
    assert "| eval loss | 3.0000 → 4.0000 at step 2, never better than before the first step |" in card
    assert "Eval loss rose from 3.0000 to 4.0000, never below the start" in (tmp_path / "report.md").read_text()
    assert not list(tmp_path.glob("checkpoint-0"))


def test_a_checkpoint_that_does_not_count_step_0_keeps_its_best(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, held_out: Callable[..., None]
) -> None:
    keys = [*base, "lora=true", "eval_steps=1", "save_steps=1", "save_total_limit=1", "load_best=true"]
    held_out(3.0, 5.0, 4.0)
    assert run_here(tmp_path, *keys, "max_steps=2") == 0
    shutil.rmtree(tmp_path / "checkpoint-0")
    change_state(tmp_path / "checkpoint-2", best_step=2, best_eval_loss=4.0)
    held_out(6.0)
    assert run_here(tmp_path, *keys, "max_steps=3") == 0
    end = records(tmp_path, "run_end")[-1]
    assert (end["export_step"], end["best_step"]) == (2, 2)


def change_state(checkpoint: Path, **values: Any) -> None:
    """Write other values of the loop into a checkpoint."""
    path, manifest = checkpoint / "state.json", checkpoint / "manifest.json"
    state = json.loads(path.read_text())
    state["loop"] |= values
    path.write_text(json.dumps(state))
    listed = json.loads(manifest.read_text())
    listed["files"]["state.json"] = {"bytes": path.stat().st_size, "xxh3_128": file_digest(path)}
    listed = {key: value for key, value in listed.items() if key != "xxh3_128"}
    manifest.write_text(json.dumps(listed))


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
