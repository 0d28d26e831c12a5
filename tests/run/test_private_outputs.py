"""What a run leaves: no secret in anything that it shows or sends, and no file written elsewhere by a link."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from surogate_core import logs
from surogate_core.files import atomic

Command = Callable[..., int]

SECRET = "s3cr3tV4lue"
URL = f"https://user:{SECRET}@127.0.0.1:9/x.jsonl?X-Amz-Signature={SECRET}"


def files_with(directory: Path, text: str) -> list[str]:
    """The files that have the text, other than what libraries keep in binary forms."""
    found = [f for f in directory.rglob("*") if f.is_file() and text.encode() in f.read_bytes()]
    return sorted(f.relative_to(directory).as_posix() for f in found)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def command(base: list[str]) -> Command:
    """The console script on a small run; later overrides win."""
    from surogate_core.cli.main import main

    def start(output: Path, *overrides: str) -> int:
        latest = {text.partition("=")[0]: text for text in (*base, "max_steps=1", *overrides)}
        return main([*latest.values(), f"output_dir={output}"])

    return start


def test_a_finished_run_shows_no_secret_and_can_be_repeated(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    before = os.umask(0o022)
    try:
        assert command(out, f"run_name='{URL}'", "max_steps=2", "monitor=[console,jsonl]") == 0
    finally:
        os.umask(before)
    # The configuration repeats the run, so it keeps what was given; nobody else may read it.
    assert files_with(out, SECRET) == ["config.yaml"]
    assert yaml.safe_load((out / "config.yaml").read_text())["run_name"] == URL
    assert mode(out / "config.yaml") == mode(out / "surogate.log") == 0o600
    assert mode(out / "metrics.jsonl") == mode(out / "run.json") == 0o644
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err
    assert "***@127.0.0.1:9/x.jsonl?X-Amz-Signature=***" in (out / "report.md").read_text()


def test_a_failed_run_shows_no_secret(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from surogate_core.run import prepare

    def fails(*given: object, **named: object) -> None:
        raise RuntimeError(f"cannot open {URL}")

    monkeypatch.setattr(prepare, "prepare", fails)
    out = tmp_path / "out"
    assert command(out) == 1
    said = capsys.readouterr().err
    assert "cannot open https://***@127.0.0.1:9/x.jsonl?X-Amz-Signature=***" in said
    assert SECRET not in said
    assert files_with(out, SECRET) == []
    assert "cannot open https://***@" in (out / "surogate.log").read_text()


def test_the_shown_configuration_has_no_secret(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from surogate_core.cli.main import main

    asked = ["monitor=[mlflow]", f"monitor.mlflow.tracking_uri='{URL}'", f"output_dir={tmp_path}"]
    for show in ("job", "all"):
        assert main(["--cfg", show, *asked]) == 0
        shown = capsys.readouterr().out
        assert SECRET not in shown
        assert "https://***@127.0.0.1:9" in shown
        yaml.safe_load(shown)


def test_no_writer_follows_a_link(command: Command, tmp_path: Path) -> None:
    """Links under the names that a run uses, to files of somebody else."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    names = ["report.html", "report.md", "config.yaml", "run.json", "metrics.jsonl"]
    hidden = [*(f".{n}.surogate-tmp" for n in names), "metrics.jsonl.tmp"]
    links = [*names, *hidden, "metrics.jsonl.previous"]
    for number, name in enumerate(links):
        (tmp_path / f"victim{number}").write_text("kept")
        (out / name).symlink_to(tmp_path / f"victim{number}")
    assert command(out, "max_steps=1") == 0
    assert [(tmp_path / f"victim{n}").read_text() for n in range(len(links))] == ["kept"] * len(links)
    assert not victim.exists()
    assert json.loads((out / "run.json").read_text())["surogate"]
    assert "run_end" in (out / "metrics.jsonl").read_text()


def test_a_log_that_is_a_link_or_a_pipe_is_refused(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "victim").write_text("kept")
    (out / "surogate.log").symlink_to(tmp_path / "victim")
    assert command(out) == 2
    said = capsys.readouterr().err
    assert "surogate.log cannot be written: it is a symbolic link" in said
    assert (tmp_path / "victim").read_text() == "kept"
    (out / "surogate.log").unlink()
    os.mkfifo(out / "surogate.log")
    assert command(out) == 2
    assert "it is not a regular file" in capsys.readouterr().err


def test_a_named_log_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "real")
    logs.open_log(tmp_path / "log", follow=True)
    logging.getLogger("surogate_core").info("here")
    logs.close_log()
    assert "here" in (tmp_path / "real").read_text()


def test_the_last_resort_of_a_log_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user's log directory cannot be written; a name in the shared directory may be somebody's link."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    (shared / f"surogate-{os.getpid()}.log").symlink_to(tmp_path / "victim")
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    (tmp_path / "file").touch()
    monkeypatch.setenv("SUROGATE_LOG_DIR", str(tmp_path / "file" / "no"))
    logs.close_log()
    path = logs.record_traceback("x", ValueError("y"))
    logs.close_log()
    assert path.parent.parent == shared
    assert mode(path.parent) == 0o700
    assert "ValueError" in path.read_text()
    assert not (tmp_path / "victim").exists()


def test_a_new_file_replaces_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    for number, write in enumerate((atomic.write_file, lambda p, d: atomic.replace_file(p, d, key="k"))):
        link = tmp_path / str(number)
        link.symlink_to(tmp_path / "victim")
        write(link, b"new")  # type: ignore[operator]
        assert (link.read_bytes(), link.is_symlink()) == (b"new", False)
    assert (tmp_path / "victim").read_text() == "kept"
