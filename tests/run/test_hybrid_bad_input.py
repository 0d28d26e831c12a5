"""What is wrong with a hybrid's files or adapters ends in one message with the name, the place and the fix."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import hybrids
import pytest
from run_fixtures import QUICK
from safetensors.torch import load_file, save_file

from surogate_core.cli.main import main
from surogate_core.errors import ConfigError, UserError

RunHere = Callable[..., int]
FAMILIES = pytest.mark.parametrize("name", ["nemotron-h", "qwen3-5"])
SCANS = {"nemotron-h": "backbone.layers.0.mixer", "qwen3-5": "model.layers.0.linear_attn"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name → directory."""
    parent = tmp_path_factory.mktemp("hybrids")
    return {name: hybrids.save(name, parent / name) for name in SCANS}


@pytest.fixture(scope="module")
def small(data_cache: Path) -> list[str]:
    """Overrides of every run."""
    return [*QUICK, f"data_cache_dir={data_cache}", "tokenizer=null", "lora=true", "lora_rank=4", "max_steps=1"]


@FAMILIES
def test_files_without_a_decay_or_a_kernel_are_refused(
    name: str, models: dict[str, Path], small: Sequence[str], tmp_path: Path, run_here: RunHere
) -> None:
    for end in ("A_log", "conv1d.weight"):
        directory = Path(shutil.copytree(models[name], tmp_path / end))
        file = directory / "model.safetensors"
        tensors, gone = load_file(file), f"{SCANS[name]}.{end}"
        del tensors[gone]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(UserError) as caught:
            run_here(tmp_path / "out", *small, f"model={directory}")
        message = str(caught.value)
        assert message.startswith(f"{directory}: the weights are not those of the model that config.json describes:")
        assert f"- {gone} is missing" in message
        assert "Fix: " in message


@FAMILIES
def test_targets_that_no_layer_has_are_refused_by_name(
    name: str, models: dict[str, Path], small: Sequence[str], tmp_path: Path, run_here: RunHere
) -> None:
    """A projection of the other layout, and tensors that are no projection."""
    for target in ("in_proj_qkvz", "conv1d", "A_log"):
        with pytest.raises(ConfigError, match=rf"lora_target_modules: {target}: no such projection .*Fix: choose from"):
            run_here(tmp_path, *small, f"model={models[name]}", f"lora_target_modules=[q_proj,{target}]")


@pytest.mark.slow
@FAMILIES
def test_an_adapter_of_a_layer_that_is_not_there_is_refused_by_name(
    name: str, models: dict[str, Path], small: Sequence[str], tmp_path: Path, run_here: RunHere,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A layer beyond the last, and attention's projection in a layer with a scan: training, merging, generating."""
    run_here(tmp_path / "run", *small, f"model={models[name]}", "lora_target_modules=[q_proj]")
    for number in (0, 99):
        adapter = Path(shutil.copytree(tmp_path / "run" / "adapter", tmp_path / str(number)))
        file = adapter / "adapter_model.safetensors"
        moved = {re.sub(r"layers\.\d+", f"layers.{number}", key): value for key, value in load_file(file).items()}
        save_file(moved, file)
        module = next(iter(moved)).removeprefix("base_model.model.").partition(".lora_")[0]
        said = f"it is not an adapter of this base: {module}: the base has no such linear layer; the nearest is "
        for mode in ("trainable", "merge"):
            words = [f"model={models[name]}", f"adapter_path={adapter}", f"adapter_init_mode={mode}"]
            with pytest.raises(UserError) as caught:
                run_here(tmp_path / "out", *small, *words, "lora_target_modules=[q_proj]")
            assert said in str(caught.value)
            assert "Fix: " in str(caught.value)
        capsys.readouterr()
        merged = str(tmp_path / "merged")
        assert main(["merge", "--base-model", str(models[name]), str(adapter), "--output", merged]) == 2
        assert main(["generate", str(adapter), "--prompt=a", "--max-new-tokens=1", "device=cpu"]) == 2
        assert capsys.readouterr().err.count(said) == 2


@FAMILIES
def test_a_prompt_of_one_token_is_continued_and_an_empty_one_refused(
    name: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(models[name]), "--max-new-tokens=3", "--temperature=0", "device=cpu"]
    assert main([*words, "--prompt=a"]) == 0
    assert main([*words, "--prompt="]) == 2
    assert "--prompt: is empty. Fix: give the text to continue." in capsys.readouterr().err
