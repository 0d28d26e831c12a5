"""Training: the loop's parts, schedules, losses measured, events between them."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.measure.stderr import mean_stderr as mean_stderr
    from surogate_core.measure.stderr import ratio_stderr as ratio_stderr
    from surogate_core.measure.subject import Subject as Subject
    from surogate_core.measure.subject import refuse_nan as refuse_nan
    from surogate_core.train.bus import EventBus as EventBus
    from surogate_core.train.bus import fault_of as fault_of
    from surogate_core.train.drive import drive as drive
    from surogate_core.train.flops import ModelFlops as ModelFlops
    from surogate_core.train.lr import Schedule as Schedule
    from surogate_core.train.lr import check_rates as check_rates
    from surogate_core.train.precision import PrecisionWatch as PrecisionWatch
    from surogate_core.train.signals import TimeUp as TimeUp
    from surogate_core.train.signals import time_limit as time_limit

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
