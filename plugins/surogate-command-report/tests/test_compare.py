"""Several runs: their names, the table of their figures, the difference of their configurations; sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from surogate_command_report import compare
from surogate_command_report.card import card_of
from surogate_command_report.write import write_report

from surogate_core.plugin import surogate as main
from surogate_core.service.files import RunRecord, find_runs


def make_run(directory: Path, *, loss: float = 2.0, config: str = "") -> Path:
    directory.mkdir(parents=True)
    records: list[dict[str, Any]] = [
        {"event": "run_start", "steps": 2, "model": "m", "device": "cpu"},
        {"event": "eval_end", "step": 0, "loss": 5.0},
        {"event": "step_end", "step": 1, "loss": 4.0, "tokens_per_second": 10.0, "seconds": 1.0},
        {"event": "step_end", "step": 2, "loss": 3.0, "tokens_per_second": 10.0, "seconds": 1.0},
        {"event": "eval_end", "step": 2, "loss": loss},
        {"event": "run_end", "reason": "finished"},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (directory / "config.yaml").write_text(config)
    return directory


def sweep(directory: Path) -> Path:
    for place, (rate, loss) in enumerate(((3e-4, 2.5), (0.001, 1.5), (0.02, 2.0))):
        config = f"learning_rate: {rate}\noptimizer:\n  name: adamw\noutput_dir: {directory / str(place)}\n"
        make_run(directory / str(place), loss=loss, config=config)
    return directory


def loaded(directory: Path) -> list[RunRecord]:
    from surogate_core.plugin import read_run

    return [read_run(run, group=group) for run, group in find_runs([directory])]


def test_a_sweep_is_one_thing_named_by_what_differs(tmp_path: Path) -> None:
    runs = loaded(sweep(tmp_path / "rates"))
    assert compare.titles(runs) == ["learning_rate=3e-4", "learning_rate=1e-3", "learning_rate=0.02"]
    card = card_of(runs)
    assert card.title == "rates: 3 runs"
    assert card.verdict == "3 finished. Lowest eval loss: 1.5000, learning_rate=1e-3, step 2"
    header, rows = compare.table(runs)
    assert header == (
        "run",
        "outcome",
        "steps",
        "eval loss",
        "best eval loss",
        "train loss",
        "tokens/s",
        "training time",
    )
    assert [row[0] for row in rows] == ["learning_rate=3e-4", "learning_rate=1e-3 (lowest)", "learning_rate=0.02"]
    assert rows[1][3:5] == ("5.0000 → 1.5000", "1.5000 (step 2)")


def test_the_report_of_a_sweep_is_written_into_its_directory(tmp_path: Path, capsys: Any) -> None:
    place = sweep(tmp_path / "rates")
    (place / "latest").symlink_to(place / "2")
    (place / "multirun.yaml").write_text("")
    assert main(["report", str(place)]) == 0
    assert capsys.readouterr().out.split() == [str(place / "report.html"), str(place / "report.md")]
    for text in ((place / "report.html").read_text(), (place / "report.md").read_text()):
        assert "rates: 3 runs" in text
        assert "learning_rate=1e-3 (lowest)" in text
        assert text.index("Runs") < text.index("Configuration: what differs") < text.index("adamw")


def test_the_directories_of_a_sweep_may_be_named_with_the_files_beside_them(tmp_path: Path) -> None:
    place = sweep(tmp_path / "rates")
    (place / "sweep.json").write_text("{}")
    output = tmp_path / "r.md"
    assert main(["report", *map(str, sorted(place.iterdir())), "--output", str(output)]) == 0
    assert "| learning_rate=1e-3 (lowest) |" in output.read_text()


def test_only_what_differs_is_compared(tmp_path: Path) -> None:
    one = "a: 1\nb: {c: true, d: x}\noutput_dir: p\nrun_name: p\nlist: [1, 2]\n"
    two = "a: 1\nb: {c: false, d: x}\noutput_dir: q\nrun_name: q\nlist: [1]\nnew: 1.0e-05\n"
    runs = loaded(make_run(tmp_path / "x", config=one)) + loaded(make_run(tmp_path / "y", config=two))
    assert compare.differences(runs) == (
        ("key", "x", "y"),
        [("b.c", "true", "false"), ("list", "[1, 2]", "[1]"), ("new", "–", "1e-5")],
    )
    assert compare.titles(runs) == ["x", "y"], "runs that the user names keep their names"


def test_names_are_distinct_where_directories_have_one_name(tmp_path: Path) -> None:
    runs = [loaded(make_run(tmp_path / name / "out"))[0] for name in ("a", "b")]
    assert compare.titles(runs) == [str(tmp_path / "a" / "out"), str(tmp_path / "b" / "out")]


def test_runs_below_a_directory_are_found_in_natural_order(tmp_path: Path) -> None:
    for name in ("run-10", "run-9", "deep/er/0", ".hidden/x", "run-9/former-1"):
        make_run(tmp_path / name)
    (tmp_path / "empty").mkdir()
    found = [run.relative_to(tmp_path).as_posix() for run, _ in find_runs([tmp_path])]
    assert found == ["deep/er/0", "run-9", "run-10"]
    assert find_runs([tmp_path / "run-9"]) == [(tmp_path / "run-9", "")]
    # A run that has not begun can be served.
    assert find_runs([tmp_path / "empty"]) == [(tmp_path / "empty", "")]


def test_without_evaluations_no_run_is_the_best(tmp_path: Path) -> None:
    runs = [RunRecord(directory=Path(name), name=name) for name in "ab"]
    assert compare.best(runs) is None
    assert "owest" not in card_of(runs).verdict


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_a_single_run_below_a_directory_is_no_comparison(tmp_path: Path, suffix: str) -> None:
    make_run(tmp_path / "runs" / "only")
    text = write_report([tmp_path / "runs"], output=tmp_path / f"r{suffix}")[0].read_text()
    assert "what differs" not in text
    assert "Finished after 2 steps" in text
