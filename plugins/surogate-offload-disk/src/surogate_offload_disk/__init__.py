"""Surogate plugin: tensors in memory-mapped files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    import torch

    from surogate_offload_disk.store import DiskStores

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `offload=disk` is."""
    return "pkg://surogate_offload_disk.conf"


@hookimpl
def surogate_offloader() -> bundles.OffloaderSpec:
    """Every kind of tensor but residuals in files."""
    return bundles.OffloaderSpec(
        name="disk",
        kinds=frozenset({"weights", "gradients", "master", "optimizer"}),
        place="disk",
        build=build,
        allocates=True,
        addressable=False,
    )


def build(options: bundles.NoOptions, directory: str, device: torch.device) -> DiskStores:
    """Stores in files of the directory."""
    # torch is imported when the engine is built, not when a configuration is checked.
    from surogate_offload_disk.store import DiskStores

    return DiskStores(directory, device)
