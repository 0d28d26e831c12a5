"""KTO in whole runs of small models: the first loss, mismatched documents, held-out rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Keys of rows in which short answers are good and long ones bad."""
    path = tmp_path_factory.mktemp("rows") / "judged.jsonl"
    rows = [
        {"prompt": f"What is {i}?", "completion": "A number." if i % 2 else "I do not know at all.", "label": i % 2}
        for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = f"{{path: '{path}', type: unpaired}}"
    return f"datasets=[{entry}]"


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_the_first_loss_is_one_half_and_training_lowers_it(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, judged: str, loss_type: str
) -> None:
    keys = (*base, "task=kto", judged, "validation_datasets=[]", "validation_split_ratio=0.2", "eval_steps=10")
    keys = (*keys, f"kto_loss_type={loss_type}", "learning_rate=1e-2", "max_steps=20", "lora=true", "lora_rank=4")
    run_here(tmp_path / "run", *keys)
    first, *_, last = records(tmp_path / "run", "eval_end")
    assert first["loss"] == pytest.approx(0.5, abs=1e-6)
    assert records(tmp_path / "run", "step_end")[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert last["loss"] < 0.49


def test_eval_has_no_reference_to_compare_with(
    tmp_path: Path, base: list[str], run_here: RunHere, judged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from surogate_core.cli.main import main

    keys = (*base, "task=kto", judged, "validation_datasets=[]", "max_steps=1", "lora=false")
    for number, share in enumerate(("0.2", "0")):  # nothing is held out: naming rows would only lead to this message
        run = tmp_path / f"run-{number}"
        run_here(run, *keys, f"validation_split_ratio={share}")
        assert main(["eval", str(run)]) == 2
        assert "compares with the model from before its first step" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_is_equal(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, judged: str
) -> None:
    keys = (*base, "task=kto", judged, "validation_datasets=[]", "lora=true", "lr_scheduler_type=constant")
    run_here(tmp_path / "whole", *keys, "max_steps=4")
    run_here(tmp_path / "parts", *keys, "max_steps=2")
    run_here(tmp_path / "parts", *keys, "max_steps=4")
    steps = [
        [(line["step"], line["loss"], line["figures"]) for line in records(tmp_path / name, "step_end")]
        for name in ("whole", "parts")
    ]
    assert steps[0] == steps[1]
