"""Which rank this process is, where torchrun or SLURM have started one process a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from surogate_core.errors import ConfigError, MachineError, Problem, UserError

if TYPE_CHECKING:
    from surogate_core.mesh.mesh import Mesh

log = structlog.get_logger(__name__)

PATIENCE_MINUTES = 10
"""The time in which all processes must have started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The place of a process among those that another launcher started."""

    rank: int
    world: int
    local_rank: int
    """Number among the ranks of this machine."""
    local_world: int
    """Ranks on this machine."""
    address: str
    """Where rank 0 listens."""
    port: int
    by: str
    """Who started the processes, for messages."""


def rank_of(environment: Mapping[str, str]) -> Rank | None:
    """The rank that the environment names; None if it names none, or only one. Raises `UserError` for half a name."""
    given = environment.keys() & {"RANK", "WORLD_SIZE"}
    if len(given) == 2 or (given and environment.keys() & {"MASTER_ADDR", "LOCAL_RANK"}):
        return _by_torchrun(environment)
    for name in given:
        # Scripts use such names for values of their own, such as the rank of an adapter.
        log.info(f"{name}={environment[name]} in the environment alone is no rank, and is ignored")
    return _by_slurm(environment)


def _by_torchrun(environment: Mapping[str, str]) -> Rank | None:
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environment:
            raise UserError(
                f"the environment has {other}={environment[other]} but no {name}. "
                f"Fix: start the processes by torchrun, or unset {other}."
            )
    rank, world = _whole(environment, "RANK"), _whole(environment, "WORLD_SIZE")
    if world == 1 and rank == 0:
        return None
    local_world = _whole(environment, "LOCAL_WORLD_SIZE", world)
    return _checked(
        Rank(
            rank=rank,
            world=world,
            local_rank=_whole(environment, "LOCAL_RANK", rank % max(local_world, 1)),
            local_world=local_world,
            address=_needed(environment, "MASTER_ADDR"),
            port=_whole(environment, "MASTER_PORT"),
            by="RANK and WORLD_SIZE",
        )
    )


def _by_slurm(environment: Mapping[str, str]) -> Rank | None:
    # Only srun starts steps. A batch script has a rank and SLURM_NTASKS too, but is one process.
    if not {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
        return None
    rank, world = _whole(environment, "SLURM_PROCID"), _whole(environment, "SLURM_STEP_NUM_TASKS")
    if world == 1:
        return None
    local_world = _tasks_here(environment, world)
    job = _whole(environment, "SLURM_JOB_ID", 0) + _whole(environment, "SLURM_STEP_ID", 0)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    return _checked(
        Rank(
            rank=rank,
            world=world,
            local_rank=_whole(environment, "SLURM_LOCALID", rank % local_world),
            local_world=local_world,
            address=environment.get("MASTER_ADDR") or _first_node(nodes),
            port=_whole(environment, "MASTER_PORT", 20000 + job % 20000),
            by="SLURM",
        )
    )


def _tasks_here(environment: Mapping[str, str], world: int) -> int:
    """Tasks of this node: ``SLURM_STEP_TASKS_PER_NODE`` is a list such as ``4(x2),3``."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(found[1])] * int(found[2] or 1)
    node = _whole(environment, "SLURM_NODEID", 0)
    return max(counts[node] if node < len(counts) else world, 1)


def _first_node(nodes: str) -> str:
    """The first host of a list such as ``gpu[07-09,12],login1``."""
    found = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        return "127.0.0.1"
    return found[1] + (found[2] or "") + (found[3] or "")


def _checked(found: Rank) -> Rank:
    if not 0 <= found.rank < found.world:
        raise UserError(f"{found.by}: rank {found.rank} of {found.world}; ranks are 0 to {found.world - 1}.")
    if not 0 <= found.local_rank < found.local_world <= found.world:
        raise UserError(
            f"{found.by}: local rank {found.local_rank} of {found.local_world} on this machine, in a run of "
            f"{found.world} processes. Fix: set LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does."
        )
    if not 0 < found.port < 65536:
        raise UserError(f"MASTER_PORT={found.port} is no port. Fix: a number from 1 to 65535.")
    return found


def _needed(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UserError(
            f"the environment has RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} but no {name}. "
            f"Fix: start the processes by torchrun, or unset RANK and WORLD_SIZE."
        )
    return environment[name]


def _whole(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "") if default is not None else _needed(environment, name)
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name}={text} in the environment is not a whole number.") from None


def check_count(found: Rank, gpus: int) -> None:
    """Raise `ConfigError` if the configuration asks for another number of GPUs than there are processes."""
    if gpus not in (0, 1, found.local_world, found.world):
        message = f"{gpus} GPUs, but {found.by} started {found.world} processes."
        raise ConfigError([Problem(key="gpus", message=message, fix=f"gpus={found.world}, or leave it out")])


def joined(found: Rank) -> Mesh:
    """Meet the other processes at rank 0's port; `MachineError` if the port is taken or processes are missing."""
    from datetime import timedelta

    from torch.distributed import DistError, rendezvous

    from surogate_core.mesh.mesh import Mesh

    # SLURM sets none of them. torchrun's agent may keep the store itself, which `rendezvous` knows.
    os.environ.setdefault("MASTER_ADDR", found.address)
    os.environ.setdefault("MASTER_PORT", str(found.port))
    os.environ.update(RANK=str(found.rank), WORLD_SIZE=str(found.world))
    place = f"{found.address}:{found.port}"
    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=PATIENCE_MINUTES)))
    except (DistError, RuntimeError, ValueError) as error:
        text = str(error)
        if "EADDRINUSE" in text or "in use" in text:
            raise MachineError(
                f"MASTER_PORT={found.port}: another process has this port. Fix: set MASTER_PORT to a free one, the "
                f"same for all {found.world} processes."
            ) from error
        raise MachineError(
            f"rank {found.rank}: the {found.world} processes have not met at {place} within {PATIENCE_MINUTES} "
            f"minutes: {text.splitlines()[0] if text else type(error).__name__}. Fix: check that all were started, "
            f"with the same MASTER_ADDR and MASTER_PORT."
        ) from error
    return Mesh(rank=found.rank, world=found.world, store=store, local_world=found.local_world)
