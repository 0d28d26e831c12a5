"""What carries a guardian's mark ends when the guardian is closed, and nothing else does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from surogate_core.environments.guardian import TOKEN, Guardian, marked

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the machine has no /proc")


def sleeper(token: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, TOKEN: token}, start_new_session=True)


def ignores(pid: int, number: int) -> bool:
    found = re.search(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def test_what_is_marked_ends_and_nothing_else() -> None:
    one, other = Guardian(), Guardian()
    mine, foreign = sleeper(f"{one.mark}-1"), sleeper(f"{other.mark}-1")
    assert one._process is not None
    while not ignores(one._process.pid, signal.SIGTERM):
        time.sleep(0.01)
    one._process.send_signal(signal.SIGTERM)  # as a scheduler does that ends all processes of a job
    assert marked(one.mark) == [mine.pid]
    one.close()
    assert mine.wait(10) == -signal.SIGKILL
    assert foreign.poll() is None
    other.close()
    assert foreign.wait(10) == -signal.SIGKILL
    other.close()


def test_a_fork_that_holds_the_pipe_does_not_delay_the_end() -> None:
    guardian = Guardian()
    fork = os.fork()
    if not fork:
        time.sleep(60)
        os._exit(0)
    try:
        closing = threading.Thread(target=guardian.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)
