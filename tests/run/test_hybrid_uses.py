"""Hybrids in every use: preferences, reinforcement learning, serving, a plan."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hybrids
import pytest
import torch
from asking import ask
from rank_world import of_step
from run_fixtures import QUICK
from safetensors.torch import load_file, save_file
from surogate_command_generate.python import generate
from surogate_command_serve.serving import serve

from surogate_core.cli.main import main

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]
LORA = ("lora=true", "lora_rank=4", "lora_dropout=0", "lora_target_modules=[all]")
NAMES = pytest.mark.parametrize("name", list(hybrids.CONFIGS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a model by its name."""
    parent, made = tmp_path_factory.mktemp("hybrids"), {}

    def model(name: str) -> Path:
        if name not in made:
            made[name] = hybrids.save(name, parent / name.replace(" ", "-"))
        return made[name]

    return model


@pytest.mark.slow
@NAMES
def test_dpo_begins_at_log_2_learns_and_resumes(
    name: str, models: Callable[[str], Path], tmp_path: Path, run_here: RunHere, records: Records, digests: Digests
) -> None:
    rows = [{"prompt": f"{i}?", "chosen": f"it is {i}", "rejected": f"no idea, {i}"} for i in range(16)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = [*QUICK, *LORA, "task=dpo", f"model={models(name)}", "tokenizer=null", f"data_cache_dir={tmp_path}/cache"]
    keys += [f"datasets=[{{path: '{tmp_path}/pairs.jsonl', type: preference}}]", "validation_datasets=[]"]
    keys += ["sequence_len=128", "learning_rate=0.01", "max_steps=4", "save_steps=2", "save_total_limit=9"]
    run_here(tmp_path / "run", *keys)
    steps = records(tmp_path / "run", "step_end")
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[-1]["loss"] < 0.69
    assert steps[-1]["figures"]["rewards/margins"] > 0
    cut = of_step(tmp_path / "run", 2, tmp_path / "cut")
    run_here(cut, *keys)
    assert digests(cut / "checkpoint-4") == digests(tmp_path / "run" / "checkpoint-4")


@pytest.mark.slow
@NAMES
def test_grpo_samples_with_the_trainers_probabilities_and_resumes(
    name: str, models: Callable[[str], Path], grpo_keys: Sequence[str], tmp_path: Path, run_here: RunHere,
    records: Records, digests: Digests,
) -> None:  # fmt: skip
    """Prompts of a group share the states at the prompt's end."""
    keys = [key for key in grpo_keys if not key.startswith(("model=", "tokenizer="))]
    keys += [f"model={models(name)}", "save_total_limit=9", "lora_target_modules=[all]", "num_generations=4"]
    run, cut = tmp_path / "run", tmp_path / "cut"
    assert run_here(run, *keys) == 0
    steps = records(run, "step_end")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(0 < step["figures"]["logprob_gap/max"] < 1e-4 for step in steps)
    of_step(run, 2, cut)
    assert run_here(cut, *keys) == 0
    assert (cut / "rollouts.jsonl").read_bytes() == (run / "rollouts.jsonl").read_bytes()
    assert digests(cut / "checkpoint-4") == digests(run / "checkpoint-4")


@pytest.mark.slow
@NAMES
def test_a_server_answers_as_generate_does(name: str, models: Callable[[str], Path]) -> None:
    """Several requests in two slots, one a single token, one twice: it begins behind the states of its prompt."""
    prompts = ["a", "The chain slips when it is worn", "oil", "a", "The chain slips when it is worn"]
    with serve(models(name), name="m", slots=2, device="cpu") as server:
        found = [ask(server, prompt=p, max_tokens=8, temperature=0)["choices"][0]["text"] for p in prompts]
    for prompt, text in zip(prompts, found, strict=True):
        (alone,) = generate(models(name), prompt, max_new_tokens=8, sampling={"temperature": 0}, device="cpu")
        assert text == alone.text


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["qwen3-5-9b", "nemotron-nano-9b-v2", "nemotron-3-nano-30b-a3b"])
def test_a_plan_counts_what_is_held_and_estimates_no_speed(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The speed of recurrent layers on a GPU is not measured, and a preset without a coefficient has none."""
    assert main(["plan", f"model={preset}", "lora=true", "--gpu", "h200"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Fits yes: " in text
    assert "Speed not estimated for a model with recurrent layers; train with max_steps=5 to see" in text
    if "a3b" in preset:
        assert main(["plan", f"model={preset}", "lora=false", "--gpu", "h200"]) == 0
        assert "router_aux_loss_coef" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron-h", "qwen3-5"])
def test_layers_for_further_tokens_are_in_exports_and_merged_models_and_said(
    name: str, models: Callable[[str], Path], data_cache: Path, tmp_path: Path, run_here: RunHere, records: Records
) -> None:
    base = Path(shutil.copytree(models(name), tmp_path / "base"))
    further = {"mtp.fc.weight": torch.randn(32, 64), "mtp.norm.weight": torch.ones(32)}
    file = base / "model.safetensors"
    save_file({**load_file(file), **further}, file, metadata={"format": "pt"})
    keys = [*QUICK, f"model={base}", "tokenizer=null", "max_steps=1", f"data_cache_dir={data_cache}"]
    run_here(tmp_path / "full", *keys, "lora=false")
    run_here(tmp_path / "lora", *keys, *LORA)
    merged = tmp_path / "merged"
    assert main(["merge", "--base-model", str(base), str(tmp_path / "lora"), "--output", str(merged)]) == 0
    for directory in (tmp_path / "full" / "model", merged):
        tensors = load_file(directory / "model.safetensors")
        assert tensors.keys() == load_file(file).keys()
        assert all(torch.equal(tensors[own], tensor) for own, tensor in further.items())
    notes = " ".join(records(tmp_path / "full", "run_start")[0]["notes"])
    assert "hold 2 tensors that no run trains (mtp.fc.weight …). An exported model has what the files have." in notes
