"""Where the time of a run's set-up went."""

from __future__ import annotations

from surogate_core.events import Progress
from surogate_core.run.set_up_times import SetUpTimes


def test_every_second_belongs_to_a_task_or_follows_one() -> None:
    now = 10.0

    def at(seconds: float) -> None:
        nonlocal now
        now = seconds

    times = SetUpTimes(lambda: now)
    for second, task, done in ((12, "pack", 0), (13, "pack", 1), (15, "pack", 2), (15.04, "load", 0), (20, "load", 2)):
        at(second)
        times.saw(Progress(task=task, done=done, total=2))
    at(27)
    found = times.ended()
    assert found == {"after load": 7.0, "load": 5.0, "pack": 3.0, "before the first task": 2.0}
    assert list(found) == ["after load", "load", "pack", "before the first task"]


def test_a_task_that_comes_again_is_summed() -> None:
    now = iter(range(100))
    times = SetUpTimes(lambda: float(next(now)))
    for done in (0, 1, 0, 1):
        times.saw(Progress(task="compile", done=done, total=1))
    assert times.ended()["compile"] == 2.0
