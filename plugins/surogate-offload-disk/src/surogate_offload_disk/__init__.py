"""Surogate plugin: tensors in memory-mapped files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUROGATE_API = ">=1,<2"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `offload=disk` is."""
    return "pkg://surogate_offload_disk.conf"


@hookimpl
def surogate_offloader() -> bundles.Offloader:
    """Every kind of tensor but residuals in files."""
    return bundles.Offloader(
        name="disk",
        kinds=frozenset({"weights", "gradients", "master", "optimizer"}),
        place="disk",
        store=_store,
        allocate=_allocate,
        addressable=False,
        prepare=lambda options, directory: directory,
    )


def _store(kind: bundles.TensorKind, device: torch.device, directory: object) -> bundles.Store:
    # torch is imported when the engine is built, not when a configuration is checked.
    from surogate_offload_disk.store import GradientStore, WeightStore

    return (GradientStore if kind == "gradients" else WeightStore)(device, _named(directory))


def _allocate(
    kind: bundles.TensorKind, elements: int, dtype: torch.dtype, device: torch.device, directory: object
) -> tuple[Tensor, Tensor]:
    from surogate_offload_disk.files import mapped

    tensor = mapped(elements * dtype.itemsize, _named(directory)).view(dtype)
    return tensor, tensor


def _named(directory: object) -> str | None:
    """The run's directory; None, the system's own for temporary files, for an engine without a run."""
    return directory if isinstance(directory, str) else None
