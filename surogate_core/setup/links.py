"""How the GPUs of a run reach each other."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from surogate_core.config.sharing import axes
from surogate_core.errors import ConfigError, Problem
from surogate_core.setup.assemble import resolve_device

if TYPE_CHECKING:
    from surogate_core.bundles import FabricSpec
    from surogate_core.config.schema import RunConfig
    from surogate_core.mesh.mesh import Mesh
    from surogate_core.plugins.registry import Registry


def check_fabric(config: RunConfig, registry: Registry, mesh: Mesh) -> None:
    """Raise `ConfigError` if the ranks are on one machine and the fabric cannot connect them."""
    if mesh.store is not None and mesh.local_world == mesh.world:
        _check(config, registry.get("fabric", config.fabric.name), mesh.world, mesh.world)


def choose_fabric(config: RunConfig, registry: Registry, mesh: Mesh) -> None:
    """Find the machines, and have the ranks connected by the fabric that the configuration names. All ranks call it.

    Raises `ConfigError` if it cannot connect them on the run's device, and `MachineError` if none can.
    """
    if mesh.world == 1:
        return
    mesh.near = neighbours(mesh)
    mesh.node = mesh.near if config.hierarchical_reduction and 1 < mesh.near < mesh.world else 0
    if mesh.store is None:
        return
    specs = registry.all("fabric")
    spec: FabricSpec = specs[config.fabric.name]
    _check(config, spec, mesh.near, mesh.world)
    plan = axes(config)
    apart = plan.replicate > 1 or plan.expert not in (1, plan.ranks)
    offers = [other for other in specs.values() if other.groups >= plan.exchanges and other.across >= apart]
    mesh.choose(partial(spec.build, config.fabric.options), resolve_device(config), offers)


def check_planned(config: RunConfig, registry: Registry, *, near: int) -> None:
    """As `check_fabric`, for GPUs that need not be here; `near` of them in each machine.

    A fabric that connects nothing here may lack a library that the machine with the GPUs has, and without --gpu the
    device of this machine need not be that of the run.
    """
    spec: FabricSpec = registry.get("fabric", config.fabric.name)
    here = config.device == "cpu" or torch.cuda.is_available()
    if config.gpus > 1 and (here or spec.supports("cpu", near, config.gpus)):
        _check(config, spec, near, config.gpus)


def _check(config: RunConfig, spec: FabricSpec, near: int, world: int) -> None:
    """Raise `ConfigError` if a fabric cannot connect the ranks."""
    kind = resolve_device(config).type
    if spec.supports(kind, near, world):
        return
    what = "GPUs" if kind == "cuda" else "processes on the CPU"
    where = "here"
    if near != world and spec.supports(kind, world, world):
        found = f"{near} on each" if near else "not equally many on each, or not neighbouring ranks"
        where = f"of these machines: {found}"
    message = f"{spec.name} cannot connect {what} {where}."
    raise ConfigError([Problem(key="fabric", message=message, fix="fabric: auto")])


def neighbours(mesh: Mesh) -> int:
    """`Mesh.near`. All ranks call it.

    srun's cyclic distribution deals ranks out to the machines in turn. Neighbours are on different machines then.
    """
    machines: list[tuple[str, int]] = mesh.gather([socket.gethostname(), mesh.local_world])
    counts = {count for _, count in machines}
    count = min(counts)
    if len(counts) > 1 or mesh.world % count:
        return 0
    if count == mesh.world:
        return count
    names = [name for name, _ in machines]
    together = all(len(set(names[at : at + count])) == 1 for at in range(0, mesh.world, count))
    return count if together else 0


def slow_links(mesh: Mesh, device: torch.device) -> list[str]:
    """A note if GPUs of one machine cannot read each other's memory. All ranks call it."""
    return no_peer_access(mesh.gather(_unreachable(mesh, device)))


def no_peer_access(unreachable: Sequence[Sequence[int]]) -> list[str]:
    """The note, from the ranks that each rank cannot reach."""
    pairs = sorted({(min(a, b), max(a, b)) for a, others in enumerate(unreachable) for b in others})
    if not pairs:
        return []
    shown = ", ".join(f"{a} and {b}" for a, b in pairs[:3])
    more = f" and {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
    return [
        f"The GPUs of ranks {shown}{more} have no peer access to each other: what they exchange goes through host "
        f"memory, which is slower. `nvidia-smi topo -m` shows how they are connected."
    ]


def _unreachable(mesh: Mesh, device: torch.device) -> list[int]:
    """Ranks of this machine whose GPU this rank's GPU cannot reach. Its own GPU is the first that it sees.

    None if the ranks of a machine are not neighbours: which of them has which GPU is not known then.
    """
    seen = torch.cuda.device_count() if device.type == "cuda" else 0
    if mesh.near < 2 or seen < mesh.near:
        return []
    first, own = mesh.rank - mesh.rank % mesh.near, mesh.rank % mesh.near
    others = [(own + number) % seen for number in range(seen)]
    return [
        first + place
        for number, place in enumerate(others)
        if number and place < mesh.near and not torch.cuda.can_device_access_peer(device, number)
    ]
