"""What the core itself offers, through the same hooks as any plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surogate_core import bundles, hookimpl


def _run_here(main: Callable[[], int], options: Any) -> int:
    return main()


@hookimpl
def surogate_objective() -> bundles.Objective:
    """Next-token cross-entropy."""
    from surogate_core.kernels.ops import cross_entropy

    return bundles.Objective(name="cross_entropy", token_loss=cross_entropy)


@hookimpl
def surogate_launcher() -> bundles.Launcher:
    """This process."""
    return bundles.Launcher(name="local", launch=_run_here)


@hookimpl
def surogate_offloader() -> bundles.Offloader:
    """No offloading."""
    from surogate_core.engine.stores import NO_OFFLOAD

    return NO_OFFLOAD


@hookimpl
def surogate_kernel_pack() -> bundles.KernelPack:
    """Kernels that torch brings."""
    from surogate_core.kernels.attention import TORCH_PACK

    return TORCH_PACK
