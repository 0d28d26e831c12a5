"""Launchers: the processes of a run, who watches them, and what a failure says."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.config.resolve import policy_from
    from surogate_core.config.schema import PluginPolicy
    from surogate_core.launch.child import LEAVE, RESUME, STOPPED, Failure
    from surogate_core.launch.forwarding import Forwarding
    from surogate_core.launch.gpus import visible
    from surogate_core.launch.local import THREADS, environment, sent
    from surogate_core.launch.restarts import Restarts
    from surogate_core.launch.supervisor import GRACE, WINDOW, Elsewhere, LaunchPlan, first_of, supervise
    from surogate_core.run.record import FACTS

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
