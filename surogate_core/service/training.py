"""Training: the loop's parts, schedules, losses measured, events between them."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.measure.stderr import mean_stderr, ratio_stderr
    from surogate_core.measure.subject import Subject, refuse_nan
    from surogate_core.train.bus import EventBus, fault_of
    from surogate_core.train.drive import drive
    from surogate_core.train.flops import ModelFlops
    from surogate_core.train.lr import Schedule, check_rates
    from surogate_core.train.precision import PrecisionWatch
    from surogate_core.train.signals import TimeUp, time_limit

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
