"""When a rank counts as silent."""

from __future__ import annotations

import pytest

from surogate_core.launch.silence import Silence
from surogate_core.mesh.lifeline import Pulse


def pulses(*reports: tuple[int, float, bool]) -> list[Pulse]:
    return [Pulse(step=step, at=at, limit=-1 if stepping else 0, failed_at=0.0) for step, at, stepping in reports]


def watched(seconds: float = 60.0, step_seconds: float = 1.0) -> Silence:
    """Two ranks that have finished five steps."""
    silence = Silence(seconds, 2)
    for step in range(1, 6):
        at = step * step_seconds
        assert silence.late(pulses((step, at, True), (step, at, True)), at) is None
    return silence


def test_the_limit_is_a_minute_or_twenty_steps() -> None:
    assert watched().limit() == 60.0
    assert watched(step_seconds=30.0).limit() == 600.0
    assert Silence(60.0, 2).limit() == float("inf")  # the first step compiles
    assert watched(seconds=0).limit() == float("inf")


def test_a_resumed_run_of_slow_steps_is_not_silent() -> None:
    """Its first report may have the step 0, and 500 steps in the time of one are no pace."""
    silence = Silence(60.0, 2)
    for step, at in ((0, 1.0), (501, 101.0)):
        assert silence.late(pulses((step, at, True), (step, at, True)), at) is None
    assert silence.late(pulses((501, 101.0, True), (501, 101.0, True)), 200.0) is None
    silence.late(pulses((502, 201.0, True), (502, 201.0, True)), 201.0)
    assert silence.limit() == 2000.0


def test_the_rank_that_is_behind_is_named() -> None:
    silence = watched()
    found = pulses((6, 6.0, True), (5, 5.0, True))
    assert silence.late(found, 64.0) is None
    assert silence.late(found, 67.0) == (1, "has been in step 6 for 62 seconds; rank 0 had finished it")


def test_a_rank_may_rest_for_any_time() -> None:
    silence = watched()
    assert silence.late(pulses((5, 5.0, False), (5, 5.0, False)), 9999.0) is None
    # The time of the rest is not the time of a step.
    silence.late(pulses((6, 5000.0, True), (6, 5000.0, True)), 5000.0)
    assert silence.limit() == pytest.approx(60.0)


def test_connecting_has_a_limit_of_its_own() -> None:
    silence = Silence(60.0, 2)
    found = [Pulse(step=0, at=5.0, limit=300.0, failed_at=0.0), Pulse(step=0, at=9.0, limit=0.0, failed_at=0.0)]
    assert silence.late(found, 304.0) is None
    late = silence.late(found, 306.0)
    assert late is not None
    assert late[0] == 0
    assert late[1].startswith("has been connecting to the other ranks for 301 seconds. NCCL_DEBUG=INFO shows")


def test_time_in_which_nobody_watched_does_not_count() -> None:
    silence = watched()
    silence.forget(500.0)
    found = pulses((5, 5.0, True), (5, 5.0, True))
    assert silence.late(found, 550.0) is None
    assert silence.late(found, 561.0) is not None
