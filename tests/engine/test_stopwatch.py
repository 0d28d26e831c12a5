"""The mean time of works on a device."""

from __future__ import annotations

import time

import pytest
import torch

from surogate_core.engine import stopwatch
from surogate_core.engine.stopwatch import Stopwatch


def test_the_mean_is_of_the_works_since_the_last_one() -> None:
    watch = Stopwatch(torch.device("cpu"))
    assert watch.mean() is None
    for seconds in (0.0, 0.02):
        watch.time(lambda seconds=seconds: time.sleep(seconds))  # type: ignore[misc]
    mean = watch.mean()
    assert mean is not None
    assert mean >= 0.01
    assert watch.mean() is None


def test_a_gpus_work_counts_once_it_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = False

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            """The device may still be working."""

        def query(self) -> bool:
            return finished

        def elapsed_time(self, end: Event) -> float:
            return 250.0

    monkeypatch.setattr(stopwatch.torch.cuda, "Event", Event)
    watch, done = Stopwatch(torch.device("cuda")), []
    for number in range(stopwatch.PENDING + 2):
        watch.time(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == list(range(stopwatch.PENDING + 2)), "works beyond those that are pending are done all the same"
    assert watch.mean() is None
    finished = True
    assert watch.mean() == 0.25
