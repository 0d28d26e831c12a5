"""The core's own fabrics. torch is imported where one of them is built."""

from __future__ import annotations

from surogate_core.bundles.fabrics import Fabric, FabricContext, FabricSpec
from surogate_core.bundles.options import NoOptions


def auto(options: NoOptions, context: FabricContext) -> Fabric:
    """The fastest fabric that connects the ranks."""
    from surogate_core.mesh.auto import Auto

    return Auto(options, context)


def groups(options: NoOptions, context: FabricContext) -> Fabric:
    """Collectives of torch.distributed."""
    from surogate_core.mesh.groups import GroupFabric

    return GroupFabric(context)


def copy_engines(options: NoOptions, context: FabricContext) -> Fabric:
    """GPUs of a machine that write into each other's memory; NCCL moves what is small, and all between machines."""
    from surogate_core.mesh.peers import PeerFabric

    return PeerFabric(context)


def _nccl(device_type: str, near: int, world: int) -> bool:
    import torch.distributed as dist

    return device_type == "cuda" and dist.is_available() and dist.is_nccl_available()


def _nccl_and_neighbours(device_type: str, near: int, world: int) -> bool:
    return near > 1 and _nccl(device_type, near, world)


def _gloo(device_type: str, near: int, world: int) -> bool:
    import torch.distributed as dist

    return device_type == "cpu" and dist.is_available() and dist.is_gloo_available()


FABRICS = (
    FabricSpec(name="auto", build=auto, groups=True, across=True, unequal=True),
    FabricSpec(
        name="copy_engines",
        build=copy_engines,
        supports=_nccl_and_neighbours,
        priority=20,
        groups=True,
        across=True,
        unequal=True,
    ),
    FabricSpec(name="nccl", build=groups, supports=_nccl, priority=10, groups=True, across=True, unequal=True),
    FabricSpec(name="gloo", build=groups, supports=_gloo, priority=10, groups=True, across=True, unequal=True),
)
