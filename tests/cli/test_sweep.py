"""The result of a sweep: names by what differs, one table, the best run."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.cli.sweep import Result, best_of, result_of, table
from surogate_core.errors import MachineError

LOSSES = {1e-3: 2.5, 3e-3: 1.25, 1e-1: float("nan")}


def trained(config: Any, registry: Any, watch: Any = None) -> int:
    """A run that leaves only the end of its record."""
    if config.learning_rate == 666:
        raise MachineError("no memory")
    loss = LOSSES.get(config.learning_rate, 3.0)
    best = loss - 0.5 if loss == 1.25 else loss
    end = {"event": "run_end", "reason": "finished", "step": 10, "seconds": 65.2, "last_eval_loss": loss}
    end |= {"best_eval_loss": best, "best_step": 5}
    place = Path(config.output_dir)
    place.mkdir(parents=True, exist_ok=True)
    (place / "metrics.jsonl").write_text(json.dumps(end) + "\n")
    return 0


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("surogate_core.run.job.launch", trained)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def test_runs_that_were_never_better_than_their_start_are_told_apart_by_their_end():
    def result(name: str, last: float) -> Result:
        return Result(
            name=name,
            directory=name,
            overrides={},
            exit_code=0,
            outcome="",
            eval_loss=last,
            best_eval_loss=2.0,
            best_step=0,
        )

    found = best_of([result("a", 9.0), result("b", 3.0), result("c", 5.0)])
    assert found is not None
    assert found.name == "b"


def test_the_table_marks_the_best_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learning_rate=1e-3,3e-3,666", "output_dir=out", "-m"]) == 3
    head, first, second, third = capsys.readouterr().out.splitlines()[1:]
    assert head.split() == ["learning_rate", "eval", "loss", "best", "at", "step", "time", "outcome", "directory"]
    assert first.split() == ["0.001", "2.5000", "2.5000", "5", "1:05", "finished", "out/learning_rate=0.001"]
    assert second.split() == [
        "0.003",
        "1.2500",
        "0.7500",
        "5",
        "1:05",
        "finished",
        "out/learning_rate=0.003",
        "←",
        "best",
    ]
    assert third.split() == ["666", "–", "–", "–", "–", "failed", "out/learning_rate=666"]
    value = json.loads((sweep / "sweep.json").read_text())
    assert value["best"] == "learning_rate=0.003"
    assert [run["overrides"] for run in value["runs"]] == [{"learning_rate": r} for r in ("0.001", "0.003", "666")]
    assert [run["directory"] for run in value["runs"]] == [f"learning_rate={r}" for r in ("0.001", "0.003", "666")]
    page = (sweep / "sweep.md").read_text().splitlines()
    assert len(page) == 5
    assert page[3].endswith("| ← best |")
    assert stat.S_IMODE((sweep / "sweep.json").stat().st_mode) == 0o600


def test_what_was_done_is_kept_if_a_signal_ends_the_sweep(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([0, 130])

    def stopped(config: Any, registry: Any, watch: Any = None) -> int:
        trained(config, registry)
        return next(codes)

    monkeypatch.setattr("surogate_core.run.job.launch", stopped)
    assert main(["learning_rate=1e-3,3e-3,1e-2", "output_dir=out", "-m"]) == 130
    runs = json.loads((sweep / "sweep.json").read_text())["runs"]
    assert [run["exit_code"] for run in runs] == [0, 130]


def test_names_are_safe_and_unlike(sweep: Path) -> None:
    for name in ("a/base", "b/base"):
        Path(name).mkdir(parents=True)
        Path(name, "config.json").write_text("{}")
    Path("my.jsonl").write_text('{"text": "x"}\n')
    assert main(["sft", "model=./a/base,./b/base", "datasets=my.jsonl", "output_dir=out", "-m"]) == 0
    assert {p.name for p in sweep.iterdir() if p.is_dir()} == {"model=.-a-base", "model=.-b-base"}
    assert main(["sft", "system='a b','a/b'", "model=./a/base", "datasets=my.jsonl", "output_dir=two", "-m"]) == 0
    names = sorted(p.name for p in Path("two").iterdir() if p.is_dir())
    assert len(names) == 2
    assert all(name.startswith("system=") for name in names)


def test_a_loss_that_is_no_number_is_not_the_best(tmp_path: Path) -> None:
    def result(name: str, loss: float | None, code: int = 0) -> Result:
        return Result(name=name, directory=name, overrides={}, exit_code=code, outcome="finished", eval_loss=loss)

    bad = [result("a", float("nan")), result("b", None), result("c", 1.0, code=1)]
    assert best_of([]) is None
    assert best_of(bad) is None
    found = best_of([*bad, result("d", 2.0)])
    assert found is not None
    assert found.name == "d"
    assert "best" not in table(bad).splitlines()[1]
    assert result_of("x", str(tmp_path), {}, 3).outcome == "failed"


def stops_at(rate: float, begun: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that note their rate; the one with `rate` is ended by a signal."""

    def one(config: Any, registry: Any, watch: Any = None) -> int:
        begun.append(config.learning_rate)
        if config.learning_rate == rate:
            return 130
        trained(config, registry)
        Path(config.output_dir, "run.json").write_text("{}")
        return 0

    monkeypatch.setattr("surogate_core.run.job.launch", one)


def test_runs_of_reinforcement_learning_are_compared_by_reward(tmp_path: Path) -> None:
    results = []
    for name, last, best in (("a", 0.9, None), ("b", 0.2, 0.95), ("c", None, None)):
        directory = tmp_path / name
        directory.mkdir()
        end = {"event": "run_end", "reason": "finished", "last_reward": last, "best_reward": best, "step": 4}
        (directory / "metrics.jsonl").write_text(json.dumps(end) + "\n")
        results.append(result_of(name, str(directory), {"learning_rate": name}, 0))
    found = best_of(results)
    assert found is not None
    assert found.name == "b"
    head, *rows = table(results).splitlines()
    assert head.split()[:3] == ["learning_rate", "reward", "best"]
    assert [row.split()[1:3] for row in rows] == [["0.9000", "–"], ["0.2000", "0.9500"], ["–", "–"]]
    assert ["← best" in row for row in rows] == [False, True, False]


@pytest.mark.slow
def test_a_resumed_sweep_starts_no_finished_run_again(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["learning_rate=1e-3,3e-3,1e-2", "-m"]
    begun: list[float] = []
    stops_at(3e-3, begun, monkeypatch)
    assert main(command) == 130
    (place,) = Path("runs").glob("sweep-*")
    capsys.readouterr()
    # What the second process would say of the finished run is not asked for again.
    (place / "learning_rate=0.001" / "metrics.jsonl").unlink()
    stops_at(0, begun, monkeypatch)
    assert main(command) == 0
    assert begun == [1e-3, 3e-3, 3e-3, 1e-2]
    out, err = capsys.readouterr()
    assert f"run 0: learning_rate=0.001 has finished already → {place}/learning_rate=0.001" in err
    assert "3 of 3 runs are done" in err
    assert f"{place}/learning_rate=0.001" in out
    runs = json.loads((place / "sweep.json").read_text())["runs"]
    assert [(run["exit_code"], run["seconds"]) for run in runs] == [(0, 65.2)] * 3
    assert main(command) == 0
    assert begun[4:] == [1e-3, 3e-3, 1e-2], "a sweep that is done begins anew"


@pytest.mark.slow
def test_a_finished_run_is_known_until_its_turn_and_started_if_it_is_gone(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["learning_rate=1e-3,666,1e-2", "-m"]
    begun: list[float] = []
    stops_at(0, begun, monkeypatch)
    monkeypatch.setitem(LOSSES, 1e-2, 1.0)
    assert main(command) == 3
    (place,) = Path("runs").glob("sweep-*")
    stops_at(666, begun, monkeypatch)
    assert main(command) == 130
    runs = json.loads((place / "sweep.json").read_text())
    assert ([run["exit_code"] for run in runs["runs"]], runs["best"]) == ([0, 130, 0], "learning_rate=0.01")
    (place / "learning_rate=0.001" / "run.json").unlink()
    (place / "learning_rate=0.001" / "metrics.jsonl").unlink()
    begun.clear()
    stops_at(0, begun, monkeypatch)
    assert main(command) == 3
    assert begun == [1e-3, 666]


@pytest.mark.slow
def test_a_sweep_is_the_same_if_its_data_and_options_are(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []

    def places(*more: str) -> set[str]:
        assert main(["datasets=my.jsonl", "learning_rate=1e-3,3e-3", *more, "-m"]) == 130
        return {path.name for path in Path("runs").glob("sweep-*")}

    stops_at(3e-3, begun, monkeypatch)
    Path("my.jsonl").write_text('{"text": "a"}\n')
    Path("own/experiment").mkdir(parents=True)
    option = Path("own/experiment/mine.yaml")
    option.write_text("# @package _global_\nwarmup_steps: 11\n")
    assert len(places()) == 1
    assert len(places()) == 1
    assert len(places("log_gpu_util=0")) == 1, "monitors do not make it another sweep"
    Path("my.jsonl").write_text('{"text": "b"}\n')
    assert len(places()) == 2, "other data"
    assert len(places("resume_from_checkpoint=false")) == 3, "anew"
    own = ["--config-dir", "own", "experiment=mine"]
    assert [len(places(*own)), len(places(*own))] == [4, 4]
    option.write_text("# @package _global_\nwarmup_steps: 12\n")
    assert len(places(*own)) == 5, "other keys in an option file"
