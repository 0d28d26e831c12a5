"""The record of a run: a start that fails, or begins anew, spoils nothing of an earlier run's."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.errors import MachineError, SurogateError, UserError
from surogate_core.files.records import read_run
from surogate_core.run.record import FACTS, EarlierRecord

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]

RECORD = ("config.yaml", "run.json", "metrics.jsonl", "report.html", "report.md", "evaluations.jsonl")


def contents(directory: Path) -> dict[str, bytes]:
    """Every file but the log and the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in (".lock", "surogate.log")
    }


def test_failed_starts_leave_a_finished_run_as_it_is(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    run_here(tmp_path, *base, "max_steps=2")
    before = contents(tmp_path)
    starts: dict[str, type[SurogateError]] = {
        "device=cuda": MachineError,
        "tokenizer=/nowhere": UserError,
        "optimizer=adamw": UserError,
        "sequence_len=80": UserError,
        "datasets=[{path: /nowhere.jsonl, type: conversation}]": UserError,
        "resume_from_checkpoint=/nowhere": UserError,
    }
    for wrong, kind in starts.items():
        with pytest.raises(kind):
            run_here(tmp_path, *base, "max_steps=2", wrong)
        assert contents(tmp_path) == before, wrong
        assert read_run(tmp_path).outcome == "finished", wrong


def test_a_start_that_fails_while_the_model_is_set_up_leaves_it_too(
    tmp_path: Path, base: list[str], run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thing before a run is accepted is its engine."""
    run_here(tmp_path, *base, "max_steps=2")
    before = contents(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise MachineError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("surogate_core.run.run.build_engine", full)
        for resume in ("true", "false"):
            with pytest.raises(MachineError):
                run_here(tmp_path, *base, "max_steps=3", f"resume_from_checkpoint={resume}")
    assert contents(tmp_path) == before


def test_a_failed_start_in_a_fresh_directory_is_recorded_and_makes_way(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    for name in ("/nowhere", "/nowhere-else"):
        with pytest.raises(UserError):
            run_here(tmp_path, *base, f"tokenizer={name}")
        (end,) = records(tmp_path, "run_end")
        assert (end["reason"], f"tokenizer {name}:" in end["message"]) == ("failed", True)
        assert f"tokenizer {name}:" in (tmp_path / "report.md").read_text()
    run_here(tmp_path, *base, "max_steps=1")
    assert [line["reason"] for line in records(tmp_path, "run_end")] == ["finished"]
    assert not (tmp_path / "former-1").exists()


@pytest.mark.slow_cases("full")
@pytest.mark.parametrize("mode", [(), ("lora=true", "lora_target_modules=[q_proj]")], ids=["full", "lora"])
def test_a_new_start_keeps_the_former_run_as_a_run_directory(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, mode: tuple[str, ...]
) -> None:
    export = "adapter" if mode else "model"
    keys = [*base, *mode, "save_steps=1", "save_total_limit=2"]
    run_here(tmp_path, *keys, "max_steps=3")
    (tmp_path / "evaluations.jsonl").write_text("{}\n")
    first = contents(tmp_path)
    for number, seed in ((1, 5), (2, 6)):
        (tmp_path / "evaluations.jsonl").write_text("{}\n")
        run_here(tmp_path, *keys, f"train_seed={seed}", "max_steps=2", "resume_from_checkpoint=false")
        (start,) = records(tmp_path, "run_start")
        former = tmp_path / f"former-{number}"
        assert any(f"were moved to {former}. To delete them: rm -r" in note for note in start["notes"])
        assert {path.name for path in former.iterdir()} == {*RECORD, export}
        assert read_run(former).outcome == "finished"
    moved = contents(tmp_path / "former-1")
    assert moved == {name: first[name] for name in moved}
    # No checkpoint of a former run is deleted, whatever its step is.
    kept = contents(tmp_path)
    for step in (2, 3):
        place = "checkpoint-2.kept-1" if step == 2 else "checkpoint-3"
        assert kept[f"{place}/state.json"] == first[f"checkpoint-{step}/state.json"]
    (note,) = [note for note in start["notes"] if "checkpoints here belong to another run" in note]
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-2.kept-1", "checkpoint-3"):
        assert str(tmp_path / name) in re.split(r"[ ,]+|\. ", note)
    # A command would delete this run's own of the same name.
    assert "rm -r" not in note
    assert json.loads((tmp_path / "run.json").read_text())["run"] in note


def test_going_on_with_the_same_run_moves_nothing(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path, *base, "max_steps=2")
    run = json.loads((tmp_path / "run.json").read_text())["run"]
    run_here(tmp_path, *base, "max_steps=4")
    assert json.loads((tmp_path / "run.json").read_text())["run"] == run
    assert [line["step"] for line in records(tmp_path, "step_end")] == [1, 2, 3, 4]
    assert not (tmp_path / "former-1").exists()
    assert not any("another run" in note for note in records(tmp_path, "run_start")[-1]["notes"])


@pytest.mark.slow
def test_a_run_from_before_run_ids_goes_on(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path, *base, "max_steps=2")
    for path in (tmp_path / "run.json", tmp_path / "checkpoint-2" / "manifest.json"):
        values = json.loads(path.read_text())
        older = {key: value for key, value in values.items() if key not in ("run", "xxh3_128")}
        path.write_text(json.dumps(older))
    run_here(tmp_path, *base, "max_steps=4")
    assert [line["step"] for line in records(tmp_path, "step_end")] == [1, 2, 3, 4]
    assert not (tmp_path / "former-1").exists()


@pytest.mark.slow
def test_a_checkpoint_of_elsewhere_does_not_go_on_in_another_runs_record(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path / "a", *base, "max_steps=2")
    run_here(tmp_path / "b", *base, "max_steps=3")
    run_here(tmp_path / "b", *base, "max_steps=4", f"resume_from_checkpoint='{tmp_path}/a/checkpoint-2'")
    assert [line["step"] for line in records(tmp_path / "b", "step_end")] == [3, 4]
    assert [line["step"] for line in records(tmp_path / "b" / "former-1", "step_end")] == [1, 2, 3]
    assert (tmp_path / "b" / "checkpoint-3").is_dir()


def test_checkpoints_that_none_can_be_read_stop_the_run(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    keys = [*base, "save_steps=1", "save_total_limit=2"]
    run_here(tmp_path, *keys, "max_steps=4")
    for step in (3, 4):
        (tmp_path / f"checkpoint-{step}" / "state.json").write_text("")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="there are 2 checkpoints, but none can be used"):
        run_here(tmp_path, *keys, "max_steps=6")
    assert contents(tmp_path) == before
    run_here(tmp_path, *keys, "max_steps=4", "resume_from_checkpoint=false")
    names = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert names == {"checkpoint-3", "checkpoint-4", "checkpoint-3.kept-1", "checkpoint-4.kept-1"}


@pytest.mark.slow
def test_a_run_does_not_read_what_it_moves(
    tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: RunHere
) -> None:
    """The adapter, or the model, of a former run in the same directory."""
    out = tmp_path / "run"
    keys = ("lora_rank=2", "eval_steps=0", "max_steps=1")
    run_here(out, *base_on(hf_dir), *keys, "merge_adapter=true")
    before = contents(out)
    for given in (f"adapter_path={out}", f"adapter_path={out}/adapter", f"model={out}/model"):
        with pytest.raises(UserError, match=r"output_dir .* that it starts from.*ANOTHER_DIRECTORY"):
            run_here(out, *base_on(hf_dir), *keys, given, "resume_from_checkpoint=false")
    assert contents(out) == before


def test_a_pipe_is_no_record(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FACTS)
    record = EarlierRecord(tmp_path)
    assert (record.exists, record.run) == (False, "")
