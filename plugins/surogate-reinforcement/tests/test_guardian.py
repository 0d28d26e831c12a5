"""A guardian ends its command with all that this has started, also if the run is killed, and removes its directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from surogate_reinforcement import guardian
from surogate_reinforcement.guardian import TOKEN, Guardian, descendants, marked

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the machine has no /proc")

ESCAPES = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
open(os.environ["TMPDIR"] + "/file", "w").close()
print("noise" * 100000, file=sys.stderr)
print("the reason", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write(os.environ["TMPDIR"])
"""
"""Two processes with a clean environment and a session of their own; one has lost its parent."""
STAYS = ESCAPES + "time.sleep(600)\n"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)
    return directory


def environment() -> dict[str, str]:
    return {**os.environ, TOKEN: uuid.uuid4().hex}


def waited(condition: Callable[[], object]) -> bool:
    for _ in range(400):
        if condition():
            return True
        time.sleep(0.02)
    return False


def running(pids: list[int]) -> list[int]:
    """Those that have not ended; nobody may wait for one that this process has not started."""
    found = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


@pytest.fixture
def guarded(temporary: Path, tmp_path: Path) -> Iterator[Callable[..., Guardian]]:
    made: list[Guardian] = []

    def one(code: str) -> Guardian:
        found = Guardian([sys.executable, "-c", code, str(tmp_path / "ready")], (), environment())
        made.append(found)
        return found

    yield one
    for each in made:
        each.close()


def test_what_has_a_clean_environment_ends_too(
    guarded: Callable[..., Guardian], temporary: Path, tmp_path: Path
) -> None:
    one = guarded(STAYS)
    ready = tmp_path / "ready"
    assert waited(lambda: ready.exists() and ready.read_text(encoding="utf-8"))
    assert list(temporary.iterdir()) == [Path(ready.read_text(encoding="utf-8"))]
    below = descendants(one.pid)
    assert len(below) == 3
    os.kill(one.pid, signal.SIGTERM)  # as a scheduler does that ends all processes of a job
    time.sleep(0.1)
    assert one.is_running()
    one.close()
    assert not running(below)
    assert not list(temporary.iterdir())


def test_a_command_that_ends_takes_what_it_has_started_with_it(
    guarded: Callable[..., Guardian], temporary: Path
) -> None:
    one = guarded(ESCAPES + "os._exit(3)")
    code, said = one.ended(10)
    assert (code, said[-11:], len(said)) == (3, "the reason\n", 4096)
    assert not list(temporary.iterdir())
    assert guarded("import os; os.kill(os.getpid(), 9)").ended(10) == (-9, "")
    assert guarded("import time; time.sleep(60)").ended(0.2) == (None, "")


def test_a_run_that_is_killed_leaves_nothing(temporary: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"""
import os, sys, time
from surogate_reinforcement.guardian import Guardian
one = Guardian([sys.executable, "-c", {STAYS!r}, {str(ready)!r}], (), {environment()!r})
print(one.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert waited(lambda: ready.exists() and ready.read_text(encoding="utf-8"))
        below = descendants(pid)
        assert len(below) == 3
        run.kill()
    assert waited(lambda: not running([pid, *below]))
    assert not list(temporary.iterdir())


def test_a_guardian_that_is_killed_or_stopped_is_no_way_out(tmp_path: Path, temporary: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGSTOP):
        given = environment()
        code = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
        one = Guardian([sys.executable, "-c", code], (), given)
        assert waited(lambda one=one: len(descendants(one.pid)) == 2)  # type: ignore[misc]
        os.kill(one.pid, number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guardian, "_PATIENCE", 0.2)
            one.close()
        assert not marked(given[TOKEN])


def test_directories_of_killed_guardians_are_removed_later(
    temporary: Path, guarded: Callable[..., Guardian], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, foreign = temporary / f"{guardian.PREFIX}old", temporary / "other"
    for directory in (old / "below", foreign):
        directory.mkdir(parents=True)
    (temporary / f"{guardian.PREFIX}link").symlink_to(foreign)
    one = guarded("import time; time.sleep(60)")
    assert waited(lambda: len(list(temporary.iterdir())) == 4)
    (used,) = set(temporary.iterdir()) - {old, foreign, temporary / f"{guardian.PREFIX}link"}
    guardian.remove_leftovers()
    assert old.exists(), "it may be a new one, without its lock as yet"
    monkeypatch.setattr(guardian, "_YOUNG", -1.0)
    guardian.remove_leftovers()
    assert (old.exists(), foreign.exists(), used.exists()) == (False, True, True)
    one.close()
    assert not used.exists()


def test_a_fork_that_holds_the_pipe_does_not_delay_the_end(guarded: Callable[..., Guardian]) -> None:
    one = guarded("import time; time.sleep(60)")
    fork = os.fork()
    if not fork:
        time.sleep(60)
        os._exit(0)
    try:
        closing = threading.Thread(target=one.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
