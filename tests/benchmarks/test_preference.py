"""The benchmark of preference training runs, and its packed pairs are what it says."""

from __future__ import annotations

import json
from pathlib import Path

import preference
import pytest
import torch

from surogate_core.batch import IGNORE_LABEL


def test_cases_have_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    preference.main(["--small", "--within", "--steps", "1", "--cases", "sft", "dpo", "reference", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [one["case"] for one in found] == ["sft", "dpo", "reference"]
    assert all(one["tokens_per_second"] > 0 and one["error"] is None for one in found)
    assert found[0]["of_sft"] == 1
    assert 0 < found[1]["with_reference"] < found[1]["tokens_per_second"]
    assert capsys.readouterr().out.count("tok/s") == 3


def test_packed_pairs_are_rows_of_whole_documents() -> None:
    words = preference.argparse.Namespace(rows=2, length=16)
    batch = preference.packed([([1, 2], [3], [4, 5]), ([6], [7, 8], [9])], words, 8)
    assert batch.input_ids.tolist() == [1, 2, 3, 1, 2, 4, 5, 6, 7, 8, 6, 9, 0, 0, 0, 0, *[0] * 16]
    trained = torch.nonzero(batch.labels != IGNORE_LABEL).flatten().tolist()
    assert (trained, batch.labels[trained].tolist()) == ([1, 4, 5, 7, 8, 10], [3, 4, 5, 7, 8, 9])
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 10, 12, 16, 32, 32]
    assert (batch.tokens, batch.label_tokens) == (12, 6)
