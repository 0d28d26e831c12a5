"""`surogate numerics`: its files, its reference, its errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from surogate_core.cli.main import main

EMBEDDED = "pkg://surogate_dataset_chat/embedded"
SMALL = (
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=1",
    "model.config.head_dim=16",
    f"datasets=[{{path: '{EMBEDDED}/train.jsonl', type: conversation, samples: 60}}]",
    f"validation_datasets=[{{path: '{EMBEDDED}/validation.jsonl', type: conversation, samples: 6}}]",
    f"tokenizer='{EMBEDDED}/tokenizer'",
    "sequence_len=64",
    "per_device_train_batch_size=2",
    "max_steps=4",
    "eval_steps=2",
    "device=cpu",
)

Numerics = Callable[..., int]


@pytest.fixture
def numerics(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Numerics:
    """Calls the command in this process; the exit code. Its files are in `tmp_path`/out."""
    cache = tmp_path_factory.getbasetemp() / "data-cache-of-numerics"

    def call(*args: str) -> int:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return main(["numerics", *SMALL, f"data_cache_dir={cache}", f"--output={tmp_path / 'out'}", *args])
        finally:
            torch.set_num_threads(threads)

    return call


def test_the_directory_is_that_of_output(
    numerics: Numerics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert numerics("output_dir=mine") == 2
    said = capsys.readouterr().err
    assert "output_dir=mine: `numerics` writes to the directory of --output. Fix: --output mine" in said
    assert not (tmp_path / "out").exists()


def test_files_of_a_comparison(numerics: Numerics, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert numerics("gpus=2", "--recipes", "bf16,fp8-hybrid", "--run", "bf16 learning_rate=1e-4") == 0
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["numerics.json", "numerics.md", "numerics.svg"]
    found: dict[str, Any] = json.loads((out / "numerics.json").read_text())
    wide, eight, slow = found["trainings"]
    assert [t["name"] for t in found["trainings"]] == ["bf16", "fp8-hybrid", "bf16 learning_rate=1e-4"]
    assert (found["steps"], found["tokens_per_step"], found["device"]) == (4, 2 * 128, "cpu")
    for training in found["trainings"]:
        assert [step for step, _ in training["held"]] == [0, 2, 4]
        assert len(training["losses"]) == 4
        # The same start on the same rows: the recipes differ by rounding, and no two are the same.
        assert math.isclose(training["losses"][0], wide["losses"][0], rel_tol=5e-3)
    assert len({t["held"][-1][1] for t in found["trainings"]}) == 3
    # A lower rate has not learnt as much from the same start.
    assert slow["losses"][0] == wide["losses"][0]
    assert slow["losses"][-1] > wide["losses"][-1]
    assert wide["saturated"] is None
    assert eight["saturated"].keys() == {"activation", "weight", "gradient"}

    # Two layers, three roles, one recipe that rounds; e4m3 keeps three bits of a fraction and e5m2 two.
    assert [(r["layer"], r["role"]) for r in found["rounding"]] == [
        (layer, role) for layer in (0, 1) for role in ("activation", "weight", "gradient")
    ]
    for one in found["rounding"]:
        low, high = (0.04, 0.07) if one["role"] == "gradient" else (0.02, 0.035)
        assert low < one["error"] < high
        assert one["saturated"] < 0.01

    text = (out / "numerics.md").read_text()
    last = {t["name"]: t["held"][-1][1] for t in found["trainings"]}
    for name, loss in last.items():
        assert f"| {name} | {loss:.4f} | {loss / last['bf16'] - 1:+.2%} |" in text
    assert text in capsys.readouterr().out
    picture = (out / "numerics.svg").read_text()
    titles = [e.text for e in ElementTree.fromstring(picture).iter() if e.get("class") == "title"]
    assert titles[:2] == ["Eval loss by step", "Eval loss: gap to bf16 by step, %"]
    assert len(titles) == 5
    assert not re.search(r"(href|src)=|url\(|<script", picture)


@pytest.mark.slow
def test_the_first_recipe_is_the_reference_and_nothing_need_be_held_out(numerics: Numerics, tmp_path: Path) -> None:
    keys = ("validation_datasets=[]", "validation_split_ratio=0", "max_steps=2")
    assert numerics(*keys, "--recipes=fp8-hybrid,bf16") == 0
    text = (tmp_path / "out" / "numerics.md").read_text()
    assert re.search(r"\| fp8-hybrid \| \d\.\d+ \| \+0\.00% \|", text)
    assert "| run | training loss of the last steps | gap |" in text
    assert "Train loss: gap to fp8-hybrid" in (tmp_path / "out" / "numerics.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipes", "bf16"], "nothing to be compared with"),
        (["--recipes", "bf16,fp9"], "no recipe 'fp9' is installed, only bf16, fp8-hybrid, nvfp4"),
        (["--recipes", "bf16,fp8-hybrid,bf16"], "named twice"),
        (["--recipes", "bf16,nvfp4", "learning_rat=1"], "learning_rate"),
        (["--run", "nvfp4 skip_quant_last_layer=1"], "skip_quant_last_layers"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
def test_mistakes_are_told_before_anything_is_trained(
    numerics: Numerics, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert numerics(*words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_reference_that_keeps_its_weights_rounded_is_refused(
    numerics: Numerics, capsys: pytest.CaptureFixture[str]
) -> None:
    assert numerics("lora=true", "max_steps=1", "--recipes=fp8-hybrid,bf16") == 2
    assert "Fix: name bf16 first, or set lora=false" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["numerics", *SMALL, f"--output={tmp_path / 'file' / 'out'}"]) == 2
    assert "--output" in capsys.readouterr().err


@pytest.mark.slow
def test_experts_have_rows_and_curves_of_their_own(numerics: Numerics, tmp_path: Path) -> None:
    sparse = ("model=qwen3-moe", "model.config.num_experts=8", "model.config.moe_intermediate_size=16", "max_steps=1")
    nf4 = ("--run", "bf16 lora=true qlora_format=nf4 lora_target_modules=[all]")
    assert numerics(*sparse, "--recipes=bf16,fp8-hybrid", *nf4) == 0
    found = json.loads((tmp_path / "out" / "numerics.json").read_text())
    assert [t["weight_format"] for t in found["trainings"]] == [None, None, "nf4"]
    errors = {(r["recipe"], r["part"], r["role"]): r["error"] for r in found["rounding"] if r["layer"] == 1}
    assert {key[1:] for key in errors if key[0] == "nf4"} == {
        *(("projections", "weight"), ("experts", "weight"), ("experts with fewest tokens", "weight"))
    }
    for recipe, low, high in (("fp8-hybrid", 0.01, 0.07), ("nf4", 0.05, 0.2)):
        assert all(low < error < high for key, error in errors.items() if key[0] == recipe), errors
    picture = (tmp_path / "out" / "numerics.svg").read_text()
    assert "Relative rounding error by layer, gradients of experts, %" in picture
    text = (tmp_path / "out" / "numerics.md").read_text()
    assert "multiplies experts in e4m3" in text
    assert "| 1 | experts with fewest tokens | gradient | fp8-hybrid |" in text
