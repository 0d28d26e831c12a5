"""Faults of ranks: the first one is reported, everything ends soon, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rank_jobs import RankJob
from structlog.testing import capture_logs

from surogate_core.errors import MachineError, UserError
from surogate_core.launch import child, supervisor
from surogate_core.launch.local import LocalOptions, launch
from surogate_core.mesh.lifeline import RankError
from surogate_core.plugins.registry import Registry

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, installed: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Launches ranks that call a function of `rank_jobs` in the directory ``run``; then nothing of them is left."""
    run, temporary = tmp_path / "run", tmp_path / "temporary"
    run.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(child, "STOPPED", 0.3)
    monkeypatch.setattr(child, "LEAVE", 0.5)
    monkeypatch.setattr(supervisor, "LEAVE", 0.5)

    def begin(does: str, **options: int) -> int:
        return launch(RankJob(does=does, directory=str(run)), LocalOptions(**options), installed)

    yield begin
    assert not list(temporary.iterdir())
    for file in run.glob("pid-*"):
        assert not is_alive(int(file.read_text())), file.name


def is_alive(pid: int) -> bool:
    try:
        return state(pid) != "Z"
    except OSError:
        return False


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_rank_is_named_with_its_last_lines(start: Start, tmp_path: Path) -> None:
    with pytest.raises(RankError) as raised:
        start("is_killed")
    pid = (tmp_path / "run/pid-1").read_text()
    log = tmp_path / "run/logs/rank-1.log"
    assert str(raised.value) == (
        f"rank 1 (process {pid}) was killed by SIGKILL, which the kernel also sends when the machine's memory is full. "
        f"{child.RESUME} The last lines of {log}:\n  the last words of rank 1"
    )
    assert raised.value.exit_code == 137
    # Rank 0 could end its record with the cause.
    assert (tmp_path / "run/record").read_text() == str(raised.value)
    assert log.stat().st_mode & 0o077 == 0


def test_errors_of_a_rank_keep_their_kind(start: Start) -> None:
    message = (
        r"(?s)^rank 1: a bug: RuntimeError: no such luck\. The traceback is in \S+surogate\.log "
        r"The last lines of \S+rank-1\.log:\n  NCCL WARN about something$"
    )
    with pytest.raises(RankError, match=message) as raised:
        start("raises")
    assert raised.value.exit_code == 1


def test_wrong_input_is_the_users_error(start: Start) -> None:
    with pytest.raises(UserError, match=r"^rank 1: micro_batches: 3 does not divide 8\.$"):
        start("refuses")


def test_what_all_ranks_refuse_is_the_fault_of_none(start: Start) -> None:
    with capture_logs() as logs, pytest.raises(UserError, match=r"^micro_batches: 3 does not divide 8\.$"):
        start("all_refuse", max_restarts=3)
    assert not logs  # wrong input is not tried again


def test_a_group_of_processes_is_killed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is empty, the system may give its number to processes of others."""
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    found = child.Child(1, ["true"], {"PATH": os.environ["PATH"]}, shared=tmp_path, log=None)
    found.process.wait()
    assert found.look(time.monotonic(), slept=False) is not None
    found.kill()
    found.close(1)
    assert killed == [found.process.pid]


def test_a_stopped_rank_ends_the_run(start: Start) -> None:
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) was stopped by a signal") as raised:
        start("is_stopped")
    assert raised.value.exit_code == 128 + signal.SIGSTOP


def test_a_stopped_rank_0_ends_its_record(start: Start, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 0 \(process \d+\) was stopped by a signal") as raised:
        start("rank_0_is_stopped")
    assert (tmp_path / "run/record").read_text() == str(raised.value)


def test_a_silent_rank_ends_the_run_and_shows_where_it_is(start: Start, tmp_path: Path) -> None:
    message = r"(?s)rank 1 .* has been in step 12 for \d+ seconds; rank 0 had finished it\..*waits_in_vain"
    with pytest.raises(RankError, match=message) as raised:
        start("falls_silent", silence=1)
    assert raised.value.exit_code == 1
    # The stacks of all ranks are in the logs.
    assert "wait_as_rank_0" in (tmp_path / "run/logs/rank-0.log").read_text()


def test_rank_0_ends_its_record_even_if_it_is_stuck(start: Start, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="was killed by SIGKILL") as raised:
        start("is_stuck")
    assert (tmp_path / "run/record").read_text() == str(raised.value)


def test_a_death_in_a_collective_is_the_cause_and_not_the_error_of_the_others(start: Start, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) was killed by SIGKILL") as raised:
        start("dies_in_a_collective")
    assert (tmp_path / "run/record").read_text() == str(raised.value)


def test_an_error_counts_at_once_also_if_its_process_lives_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that wait for it are not to blame, although they finish no step."""
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    with pytest.raises(RankError, match=r"^a bug: RuntimeError: the error of rank 0\."):
        start("outlives_its_error", silence=1)
    assert not (tmp_path / "run/outlived").exists()


@pytest.mark.slow
def test_a_rank_with_an_error_has_time_to_report_it(start: Start) -> None:
    with pytest.raises(UserError, match=r"^rank 1: the error of rank 1\.$"):
        start("searches_after_its_error", silence=1)


@pytest.mark.slow
def test_an_error_that_is_never_reported_ends_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "REPORT", 2)
    message = r"(?s)^rank 1 .* met an error and did not report it within 2 seconds\..*waits_in_vain"
    with pytest.raises(RankError, match=message):
        start("never_reports_its_error")


def test_a_process_that_does_not_end_is_killed(start: Start) -> None:
    assert start("leaves_a_thread") == 3


def test_a_run_starts_again_from_its_last_checkpoint(start: Start, tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert start("fails_at_first", max_restarts=2) == 0
    assert (tmp_path / "run/resumed").exists()
    (line,) = [entry["event"] for entry in logs]
    assert line.startswith("the run starts again from checkpoint-3 (restart 1 of 2): rank 1 (process ")


def test_a_run_that_fails_again_ends(start: Start) -> None:
    with capture_logs() as logs, pytest.raises(RankError, match="no such luck"):
        start("raises", max_restarts=1)
    assert [entry["event"].partition(":")[0] for entry in logs] == ["the run starts again (restart 1 of 1)"]


# ------------------------------------------------------------------------------------ signals


def when_ready(run: Path, act: Callable[[], None]) -> None:
    """Act in a thread once both ranks are ready."""

    def wait() -> None:
        wait_until(lambda: all((run / f"ready-{rank}").exists() for rank in range(2)))
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_a_signal_reaches_rank_0_and_all_stop(start: Start, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    when_ready(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert start("agrees_to_stop") == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_signal_ends_the_run_at_once(start: Start, tmp_path: Path) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    when_ready(tmp_path / "run", twice)
    assert start("ignores_signals") == 143


def test_a_second_signal_ends_the_wait_for_rank_0(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE", 30)

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    when_ready(tmp_path / "run", twice)
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        start("cannot_end")
    assert not (tmp_path / "run/outlived").exists()


def test_a_signal_before_the_run_handles_it_is_no_failure(start: Start, tmp_path: Path) -> None:
    when_ready(tmp_path / "run", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert start("runs") == 130


SUPERVISOR = """
import sys
sys.path[:0] = sys.argv[2:]
from rank_jobs import RankJob
from structlog.testing import capture_logs
from surogate_core.launch.local import LocalOptions, launch
launch(RankJob(does="runs", directory=sys.argv[1]), LocalOptions(), None)
"""


def test_ranks_sleep_and_die_with_their_supervisor(tmp_path: Path) -> None:
    """Ctrl-Z stops them, `fg` lets them go on, and a killed supervisor leaves none."""
    paths = [path for path in sys.path if path.endswith("support")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # for what it cannot remove when it is killed
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path), *paths], env=environment)
    wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    pids = [process.pid, *(int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2))]
    os.kill(process.pid, signal.SIGTSTP)
    wait_until(lambda: all(state(pid) == "T" for pid in pids))
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: all(state(pid) == "S" for pid in pids))
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


# ------------------------------------------------------------------------------- the machine


def test_only_directories_of_killed_supervisors_are_deleted(start: Start, tmp_path: Path) -> None:
    def make(name: str, *files: str) -> Path:
        directory = tmp_path / "temporary" / f"{supervisor.PREFIX}{name}"
        directory.mkdir(mode=0o700)
        for file in files:
            (directory / file).parent.mkdir(exist_ok=True)
            (directory / file).touch()
        os.utime(directory, (1, 1))
        return directory

    files = ("job.json", "store", "pulses", "outcome-0.json", "outcome-11.part", "stacks-1.txt")
    gone = [make("aaaaaaaa", *files), make("bbbbbbbb")]
    young, held, public = (make(name * 8, *files) for name in "yhp")
    os.utime(young)
    public.chmod(0o755)
    # Others may choose such names: an output directory, a file, a link, a directory with a name of ours.
    kept = [young, held, public, make("mine", *files), make("cccccccc", *files, "checkpoint-100/model.safetensors")]
    kept += [make("dddddddd", *files, "rank-1.log"), make("eeeeeeee", "store/model.safetensors")]
    link = young.with_name(f"{supervisor.PREFIX}llllllll")
    link.symlink_to(tmp_path / "run")
    before = [sorted(directory.rglob("*")) for directory in kept]
    lock = supervisor._kept_from_cleaners(held)
    assert start("leaves_a_thread") == 3
    assert not any(directory.exists() for directory in gone)
    assert [sorted(directory.rglob("*")) for directory in kept] == before
    assert link.is_symlink()
    os.close(lock)
    link.unlink()
    for directory in kept:
        shutil.rmtree(directory)


def test_a_missing_temporary_directory_is_the_machines_fault(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as gone:
        gone.setattr(tempfile, "tempdir", "/nowhere")
        with pytest.raises(
            MachineError, match=r"cannot be started: .*/nowhere.* Fix: check the free space of /nowhere"
        ):
            start("runs")


def test_processes_that_cannot_start_are_the_machines_fault(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **keys: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(MachineError, match=r"the 2 processes of the run cannot be started: .*ulimit -u"):
        start("runs")


def test_a_dump_of_stacks_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its threads come one after the other."""
    dump = tmp_path / "stacks"
    coming = iter((b"", b"Thread 1:\n", b"  in wait\n", b"", b"Current thread 2:\n", b"  in <module>\n", b""))

    def sleep(seconds: float) -> None:
        with dump.open("ab") as file:
            file.write(next(coming))

    monkeypatch.setattr(child.time, "sleep", sleep)
    assert child._whole(dump) == b"Thread 1:\n  in wait\nCurrent thread 2:\n  in <module>\n"


def test_a_process_that_is_stopped_dumps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "WRITING", 0.15)
    assert child._whole(tmp_path / "none") == b""
