"""The options of `launcher=ray`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from surogate_core.plugin import bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of `launcher=ray`."""

    ray_address: str = "auto"
    """The cluster: `auto` is the one that RAY_ADDRESS names or this machine belongs to, `local` starts one for this run
    on this machine alone, and HOST:PORT names another."""
    num_nodes: Annotated[int, Interval(ge=1, le=1024)] = 1
    """Machines that the run uses."""
    gpus_per_node: Annotated[int, Interval(ge=0, le=64)] = 0
    """GPUs of each machine that the run uses, one process on each; 0 is `gpus` divided by the machines if `gpus` is
    more than 1, and otherwise all GPUs of each machine, or one process on the CPU."""
    min_nodes: Annotated[int, Interval(ge=1, le=1024)] = 1
    """Fewest machines with which a restart goes on after a machine was lost; with `num_nodes` it waits for another."""
    max_restarts: Annotated[int, Interval(ge=0, le=1000), bundles.Flat("max_restarts")] = 0
    """How often the run starts again from its last checkpoint after a process died, hung or had a bug, or a machine was
    lost."""
    silence: Annotated[int, Interval(ge=0, le=10**6)] = 60
    """Seconds without a step, and at least 20 median steps, after which a process counts as hung; 0 is never."""
    node_silence: Annotated[int, Interval(ge=1, le=10**6)] = 10
    """Seconds without an answer after which a machine counts as lost."""
