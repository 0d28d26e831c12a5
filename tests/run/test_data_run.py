"""The notes about a run's data, and how the data reach the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]


def write(path: Path, turns: list[list[dict[str, Any]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


def test_before_the_first_step_a_document_shows_that_almost_nothing_is_trained(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    asked = {"role": "user", "content": "why " * 40}
    rows = write(tmp_path / "rows.jsonl", [[asked] * 3 + [{"role": "assistant", "content": "!"}]] * 30)
    data = f"datasets=[{{path: '{rows}', type: conversation}}]"
    run_here(tmp_path / "run", *base, data, "validation_datasets=[]", "max_steps=1", "sequence_len=512", "eval_steps=0")
    (start,) = records(tmp_path / "run", "run_start")
    (example,) = [note for note in start["notes"] if note.startswith("An example in which almost nothing is trained")]
    assert "⟦!" in example


@pytest.mark.slow
def test_loss_weights_change_the_run_and_weights_of_one_do_not(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    def rows(**extra: Any) -> list[list[dict[str, Any]]]:
        return [
            [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * (3 + i % 5), **extra}]
            for i in range(60)
        ]

    halves = rows()
    for conversation in halves[::2]:
        conversation[1]["weight"] = 0.5
    losses = {}
    for name, turns in (("plain", rows()), ("ones", rows(weight=1.0)), ("halves", halves)):
        path = write(tmp_path / f"{name}.jsonl", turns)
        data = f"datasets=[{{path: '{path}', type: conversation}}]"
        run_here(tmp_path / f"run-{name}", *base, data, "validation_datasets=[]", "max_steps=3")
        losses[name] = [line["loss"] for line in records(tmp_path / f"run-{name}", "step_end")]
    assert losses["plain"] == losses["ones"]
    assert losses["halves"] != losses["plain"]
    assert losses["halves"] == pytest.approx(losses["plain"], rel=0.2)
