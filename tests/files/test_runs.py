"""``latest`` leads to the run that began last, by a link or by a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_core.errors import UserError
from surogate_core.files.runs import RUNS, START, latest_run, point_latest, run_directory


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def own(name: str) -> Path:
    directory = RUNS / name
    directory.mkdir(parents=True)
    (directory / START).write_text("{}")
    return directory


def test_latest_follows_the_runs_and_those_of_a_sweep() -> None:
    for name in ("a", "b"):
        point_latest(own(name))
        assert latest_run(command="surogate report") == RUNS / name
        assert (RUNS / "latest").resolve() == (RUNS / name).resolve()
    (own("sweep") / "0").mkdir()
    point_latest(RUNS / "sweep/0")
    assert run_directory("latest") == run_directory("runs/latest") == RUNS / "sweep/0"
    assert not list(RUNS.glob(".latest*"))


def test_a_directory_that_the_user_named_is_not_the_latest() -> None:
    Path("mine").mkdir()
    point_latest(Path("mine"))
    assert not RUNS.exists()
    with pytest.raises(UserError, match=r"no run is named and there is no runs/latest. Fix: surogate report RUN"):
        latest_run(command="surogate report")


def test_a_file_stands_in_for_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refused)
    point_latest(own("a"))
    assert (RUNS / "latest").read_text() == "a"
    assert run_directory(RUNS / "latest") == latest_run(command="x") == RUNS / "a"


def test_what_is_no_link_is_meant_as_it_is() -> None:
    assert run_directory("some/where") == Path("some/where")
    Path("latest").mkdir()
    assert run_directory("latest") == Path("latest")
