"""Surogate plugin: tensors in pinned host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUROGATE_API = ">=1,<2"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `offload=host` is."""
    return "pkg://surogate_offload_host.conf"


@hookimpl
def surogate_offloader() -> bundles.Offloader:
    """Every kind of tensor in pinned host memory."""
    return bundles.Offloader(
        name="host",
        kinds=frozenset({"weights", "residuals", "gradients", "master", "optimizer"}),
        place="host",
        store=_store,
        allocate=_allocate,
    )


def _store(kind: bundles.TensorKind, device: torch.device, options: Any) -> bundles.Store:
    # torch is imported when the engine is built, not when a configuration is checked.
    from surogate_offload_host.store import GradientStore, ResidualStore, WeightStore

    stores = {"residuals": ResidualStore, "gradients": GradientStore}
    return stores.get(kind, WeightStore)(device)


def _allocate(
    kind: bundles.TensorKind, elements: int, dtype: torch.dtype, device: torch.device, options: Any
) -> tuple[Tensor, Tensor]:
    from surogate_offload_host.memory import HostBlock

    block = HostBlock(elements * dtype.itemsize, device)
    return block.on_device.view(dtype), block.on_host.view(dtype)
