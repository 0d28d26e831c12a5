"""`launcher=local`: one process for each GPU of this machine, or this process as one of those that torchrun started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
from annotated_types import Interval

from surogate_core.bundles.options import Flat
from surogate_core.errors import MachineError, UserError
from surogate_core.files import atomic
from surogate_core.host import cores
from surogate_core.launch.child import Failure
from surogate_core.launch.forwarding import Forwarding
from surogate_core.launch.gpus import VISIBLE, rotated, visible
from surogate_core.launch.ranks import Rank, check_count, joined, rank_of
from surogate_core.launch.restarts import Restarts
from surogate_core.launch.supervisor import LaunchPlan, supervise

if TYPE_CHECKING:
    from surogate_core.bundles.handed import Plugins
    from surogate_core.bundles.launchers import Job

log = structlog.get_logger(__name__)

THREADS = "OMP_NUM_THREADS"
"""The variable that says how many threads a rank computes with on the CPU."""
QUIET = ("TORCH_CPP_LOG_LEVEL", "ERROR")
"""Without it a rank that ends early has the last word with a warning about its process group or store."""
LOOPBACK = Path("/sys/class/net/lo")
PROCESSES_A_CORE = 4
"""Most processes of a run for each CPU core; 8 processes always start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Options of `launcher=local`."""

    max_restarts: Annotated[int, Interval(ge=0, le=1000), Flat("max_restarts")] = 0
    """How often the run starts again from its last checkpoint after a process died, hung or had a bug."""
    silence: Annotated[int, Interval(ge=0, le=10**6)] = 60
    """Seconds without a step, and at least 20 median steps, after which a process counts as hung; 0 is never."""


def launch(job: Job, options: LocalOptions, registry: Plugins) -> int:
    """Run the job with as many processes as it has GPUs; the exit code. One process is this one."""
    found = rank_of(os.environ)
    if found is not None:
        if options.max_restarts and found.rank == 0:
            log.warning(f"max_restarts has no effect: another launcher started the processes ({found.by})")
        return _join(job, found, registry)
    wanted, device = job.config["gpus"], job.config["device"]
    gpus = [] if device == "cpu" or wanted == 1 else visible(os.environ)
    world = processes(wanted, device, len(gpus))
    if world == 1 and not options.max_restarts:
        return job.run(registry=registry)
    restarts = Restarts(job.config, options.max_restarts)
    sent_job = sent(job, world, sys.path)
    logs = Path(job.config["output_dir"]) / "logs"
    if world > 1:
        atomic.ensure_writable(logs, key="output_dir")
    plan = LaunchPlan(
        job=sent_job,
        environments=[environment(os.environ, rank, world, gpus) for rank in range(world)],
        logs=logs,
        silence=options.silence,
    )

    def start(resume: bool) -> int | Failure:
        return supervise(replace(plan, job=sent(job, world, sys.path, resume=resume)) if resume else plan, signals)

    with Forwarding() as signals:
        return restarts.run(start, signals)


def processes(wanted: int, device: str, gpus: int) -> int:
    """The number of processes for the key `gpus` on a machine with this number of GPUs; raises `MachineError` if it has
    fewer GPUs, or too few CPU cores."""
    if device == "cpu":
        most = max(PROCESSES_A_CORE * cores(), 8)
        if wanted > most:
            here = f"{cores()} CPU core{'s' if cores() > 1 else ''}"
            raise MachineError(
                f"gpus={wanted}: with device=cpu it is the number of processes, and this machine has {here} for them. "
                f"Fix: gpus={most} or fewer."
            )
        return max(wanted, 1)
    if wanted > max(gpus, 1):
        here = {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")
        masked = f" that {VISIBLE}={os.environ[VISIBLE]} lets it see" if VISIBLE in os.environ else ""
        fix = "gpus=0 for all of them" if gpus > 1 else "gpus=1"
        cpu = "" if gpus else f", or device=cpu for {wanted} processes on the CPU"
        raise MachineError(f"gpus={wanted}: this machine has {here}{masked}. Fix: {fix}{cpu}.")
    return wanted or max(gpus, 1)


def environment(
    before: Mapping[str, str], rank: int, world: int, gpus: Sequence[str], *, first: int = 0, here: int = 0
) -> dict[str, str]:
    """The environment of a rank of this machine. `gpus`: those of all ranks of the machine, none on a CPU.

    `first`, `here`: the first rank of this machine and the number of them, where the run has ranks on others too.
    """
    here, local = here or world, rank - first
    own = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": here}
    found = {**before, **{name: str(value) for name, value in own.items()}}
    if gpus:
        found[VISIBLE] = rotated(gpus, local)
    if world > 1:
        found.setdefault(*QUIET)
        found.setdefault(THREADS, str(threads(here)))
        if here == world and LOOPBACK.exists():
            # NCCL would listen on the first network and gloo on that of this machine's name: neither may work.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                found.setdefault(name, LOOPBACK.name)
    return found


def threads(ranks: int) -> int:
    """Threads of each of the ranks of this machine, which share the cores of the process that starts them."""
    return max(cores() // ranks, 1)


def sent(
    job: Job, world: int, path: Sequence[str], *, resume: bool = False, changes: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What a worker reads. `path`: its `sys.path`. `changes`: keys that differ from the job's.

    Raises what `job.to_json` raises.
    """
    kind = type(job)
    values = job.to_json(resume=resume, changes=changes)
    return {"job": f"{kind.__module__}:{kind.__qualname__}", "values": values, "world": world, "path": list(path)}


def _join(job: Job, found: Rank, registry: Plugins) -> int:
    """Run this process's part beside those that another program started."""
    check_count(found, job.config["gpus"])
    if job.config["device"] != "cpu":
        _choose_gpu(found)
    os.environ.setdefault(THREADS, str(threads(found.local_world)))
    os.environ.setdefault(*QUIET)
    return job.run(rank=found.rank, world=found.world, registry=registry, mesh=lambda: joined(found))


def _choose_gpu(found: Rank) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise UserError(
            f"rank {found.rank}: this process has used CUDA already, and cannot choose its GPU any more. "
            f"Fix: start the run before other work on the GPU."
        )
    gpus = visible(os.environ)
    if len(gpus) == 1 and VISIBLE in os.environ:
        return  # SLURM gives each task its own
    if gpus and found.local_rank >= len(gpus):
        count = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
        raise MachineError(
            f"rank {found.rank}: {found.by} started {found.local_world} processes on this machine, which has {count}. "
            f"Fix: start one process for each GPU, or set device=cpu."
        )
    if gpus:
        os.environ[VISIBLE] = rotated(gpus, found.local_rank)
