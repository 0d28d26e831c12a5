"""`surogate.evaluate`: the figures of the command line, from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import surogate
from surogate_core.cli.main import main


def test_it_is_what_the_command_prints(
    hf_dir: Path, tmp_path: Path, data_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"The chain of bike {n} slips."}) + "\n" for n in range(4)))
    rows = [{"path": str(file), "type": "text"}]
    (one,) = surogate.evaluate(hf_dir, datasets=rows, sequence_len=64, device="cpu", data_cache_dir=data_cache)
    words = [f"datasets=[{{path: '{file}', type: text}}]", "sequence_len=64", "device=cpu", "--json"]
    capsys.readouterr()
    assert main(["eval", str(hf_dir), *words, f"data_cache_dir={data_cache}"]) == 0
    (printed,) = json.loads(capsys.readouterr().out)
    assert (one.loss, one.documents, one.model) == (printed["loss"], 4, str(hf_dir))


def test_bad_input(hf_dir: Path) -> None:
    with pytest.raises(surogate.UserError, match="this is no run, so the rows to evaluate must be named"):
        surogate.evaluate(hf_dir)
    with pytest.raises(surogate.ConfigError, match="devise"):
        surogate.evaluate(hf_dir, datasets=[{"path": "a.jsonl"}], devise="cpu")
