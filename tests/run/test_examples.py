"""The commands in the headers of examples/ run as they stand, on tiny models and data with the names they use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import example_commands
import pytest
from example_commands import SHORT, SMALL

from surogate_core.cli.main import main


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user who types the commands has around them."""
    here = tmp_path_factory.mktemp("examples")
    example_commands.furnish(here)
    return here


@pytest.fixture
def typed(place: Path, monkeypatch: pytest.MonkeyPatch, data_cache: Path) -> Callable[..., None]:
    """Types a command of a header, with more overrides behind it."""

    def call(words: list[str], *more: str) -> None:
        monkeypatch.chdir(place)
        code = main([*words, *more, f"data_cache_dir={data_cache}"])
        assert code == 0

    return call


def command(name: str, index: int = 0) -> list[str]:
    return example_commands.commands(example_commands.ROOT / "examples" / f"{name}.yaml")[index]


@pytest.mark.slow_cases("qlora_nvfp4", "instruction_data", "full_finetune", "dpo")
@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("lora", "lora/adapter/adapter_model.safetensors"),
        ("qlora_8b", "qlora-8b/adapter/adapter_model.safetensors"),
        ("qlora_nvfp4", "qlora-nvfp4/model/model.safetensors"),
        ("instruction_data", "instruction-lora/adapter/adapter_model.safetensors"),
        ("full_finetune", "full-finetune/model/model.safetensors"),
        ("pretrain", "pretrain/model/model.safetensors"),
        ("dpo", "dpo/adapter/adapter_model.safetensors"),
    ],
)
def test_a_command_runs(name: str, result: str, place: Path, typed: Callable[..., None]) -> None:
    typed(command(name), *SHORT)
    assert (place / "runs" / result).is_file()


@pytest.mark.parametrize("model", ["Qwen2.5-0.5B-Instruct", "Llama-3.2-1B-Instruct"])
def test_the_first_example_trains_the_other_families(model: str, place: Path, typed: Callable[..., None]) -> None:
    typed([*command("lora")[:2], f"model=./{model}"], *SHORT, f"output_dir=runs/{model}")
    assert (place / "runs" / model / "adapter/adapter_model.safetensors").is_file()


def test_stacked_lora_runs_on_the_adapter_of_the_first_example(place: Path, typed: Callable[..., None]) -> None:
    if not (place / "runs/lora/adapter").is_dir():
        typed(command("lora"), *SHORT)
    typed(command("stacked_lora"), *SHORT)
    assert (place / "runs/stacked-lora/adapter/adapter_model.safetensors").is_file()
    assert (place / "runs/stacked-lora/model/model.safetensors").is_file()


def test_pretraining_on_texts_of_ones_own(place: Path, typed: Callable[..., None]) -> None:
    small = [f"model.config.{key}={value}" for key, value in {**SMALL, "head_dim": 16}.items()]
    typed(command("pretrain", 1), *SHORT, *small, "output_dir=runs/own-texts")
    assert (place / "runs/own-texts/model/model.safetensors").is_file()


def test_the_data_of_an_example_is_shown(typed: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    words = command("lora", 1)
    assert words[0] == "tokenize"
    typed(words, "sequence_len=128")
    out = capsys.readouterr().out
    assert "⟦" in out
    assert "80" in out


def test_the_memory_of_an_example_is_predicted(typed: Callable[..., None]) -> None:
    words = command("full_finetune", 1)
    assert words[0] == "plan"
    typed(words)
