"""Surogate plugin: tensors in pinned host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    import torch

    from surogate_offload_host.store import HostStores

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `offload=host` is."""
    return "pkg://surogate_offload_host.conf"


@hookimpl
def surogate_offloader() -> bundles.OffloaderSpec:
    """Every kind of tensor in pinned host memory."""
    return bundles.OffloaderSpec(
        name="host",
        kinds=frozenset({"weights", "residuals", "gradients", "master", "optimizer"}),
        place="host",
        build=build,
        allocates=True,
    )


def build(options: bundles.NoOptions, directory: str, device: torch.device) -> HostStores:
    """Stores in the memory of the host."""
    # torch is imported when the engine is built, not when a configuration is checked.
    from surogate_offload_host.store import HostStores

    return HostStores(device)
