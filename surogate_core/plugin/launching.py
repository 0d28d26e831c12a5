"""Launchers: the processes of a run, who watches them, and what a failure says."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.config.resolve import policy_from as policy_from
    from surogate_core.config.schema import PluginPolicy as PluginPolicy
    from surogate_core.host import cores as cores
    from surogate_core.launch.child import LEAVE as LEAVE
    from surogate_core.launch.child import RESUME as RESUME
    from surogate_core.launch.child import STOPPED as STOPPED
    from surogate_core.launch.child import Failure as Failure
    from surogate_core.launch.forwarding import Forwarding as Forwarding
    from surogate_core.launch.gpus import visible as visible
    from surogate_core.launch.local import THREADS as THREADS
    from surogate_core.launch.local import environment as environment
    from surogate_core.launch.local import sent as sent
    from surogate_core.launch.restarts import Restarts as Restarts
    from surogate_core.launch.supervisor import GRACE as GRACE
    from surogate_core.launch.supervisor import WINDOW as WINDOW
    from surogate_core.launch.supervisor import Elsewhere as Elsewhere
    from surogate_core.launch.supervisor import LaunchPlan as LaunchPlan
    from surogate_core.launch.supervisor import first_of as first_of
    from surogate_core.launch.supervisor import supervise as supervise
    from surogate_core.run.record import FACTS as FACTS

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
