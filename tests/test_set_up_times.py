"""Where the seconds before the first step go."""

from __future__ import annotations

from surogate_core import set_up_times
from surogate_core.events import Progress
from surogate_core.set_up_times import SetUpTimes


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


def test_the_first_run_of_a_command_goes_on_with_its_phases() -> None:
    set_up_times.begin("reading the configuration")
    set_up_times.turn_to("importing torch")
    times = set_up_times.of_run()
    assert list(times._seconds) == ["reading the configuration", "importing torch"]
    times.saw(Progress(task="pack", done=0, total=1))
    assert list(times._seconds)[-1] == set_up_times.FIRST


def test_a_later_run_and_one_without_a_command_begin_anew() -> None:
    set_up_times.begin("reading the configuration")
    set_up_times.of_run()
    set_up_times.turn_to("importing torch")
    assert set_up_times.of_run()._seconds == {}
