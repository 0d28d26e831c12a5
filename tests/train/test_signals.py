"""SIGINT and SIGTERM: recorded once, deadly twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from surogate_core.train.signals import StopSignals, TimeUp, time_limit


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_first_is_recorded_and_handlers_return(number: signal.Signals, code: int) -> None:
    before = signal.signal(number, signal.default_int_handler)  # nohup ignores SIGHUP
    try:
        with StopSignals() as stop:
            assert stop.received is None
            assert stop.exit_code == 0
            os.kill(os.getpid(), number)
            assert stop.received == number
            assert stop.exit_code == code
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """As nohup leaves it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_kinds_keep_the_first() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.exit_code == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_of_a_kind_ends_at_once(number: signal.Signals) -> None:
    program = (
        "import os, sys\n"
        "from surogate_core.train.signals import StopSignals\n"
        "with StopSignals():\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    print('alive', flush=True)\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    print('still alive', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n"
    assert done.returncode == -number


def test_outside_the_main_thread_it_does_nothing() -> None:
    failures = []

    def body() -> None:
        try:
            with StopSignals() as stop:
                assert stop.exit_code == 0
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert failures == []


def test_a_time_limit_ends_what_hangs_and_leaves_the_outer_one() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(60):
        with pytest.raises(TimeUp), time_limit(0.02):
            time.sleep(60)
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    assert signal.getsignal(signal.SIGALRM) is before
