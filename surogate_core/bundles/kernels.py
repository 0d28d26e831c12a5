"""Kernel packs: implementations of registered ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One implementation of a registered op."""

    op: str
    """The op's name, e.g. ``rms_norm``: one of the core, of `KernelPack.ops` or of `KernelPack.serves`."""
    name: str
    """Unique within the op, shown by `surogate doctor`."""
    function: Callable[..., Any]
    """Same meaning as the op's reference, and its signature without the extensions that the kernel does not know;
    differentiable under tracing.
    """
    supports: Callable[[torch.device, torch.dtype], bool]
    """(device, dtype of the first argument) → whether it can run there."""
    takes: Callable[..., bool] = lambda *args, **kwargs: True
    """Whether it supports these arguments, called with the op's arguments while a block is traced: shapes, never
    values.
    """
    knows: frozenset[str] = frozenset()
    """The op's extensions that it computes: keyword-only parameters with a default. A call whose argument differs from
    the default is offered only to kernels that know it; the others never see the parameter.
    """
    priority: int = 0
    """The highest supporting priority wins; the reference has -100. Two packs that offer a call the same priority are
    an error.
    """
    deterministic: bool = True
    """Whether equal inputs give equal bits. A kernel without this property is used only with `deterministic=false`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPack:
    """A set of kernels for some hardware."""

    name: str
    """Shown by `surogate doctor`."""
    kernels: Callable[[], Iterable[Kernel]]
    """Called once, on first use; may compile."""
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    """The reason why the device cannot use the pack, or None."""
    rewrites: Callable[[], Iterable[Callable[[torch.fx.Graph], None]]] = tuple
    """Changes to a block's joint graph of forward and backward, made in place before it is cut in two, for example to
    replace several ops by one kernel. Called once; the graph may contain ops of other packs.
    """
    ops: tuple[str, ...] = ()
    """Modules that define ops of its own (`surogate_core.kernels.registry.op`), e.g. ``acme_scan.ops``. A run imports
    them before it chooses kernels.
    """
    serves: frozenset[str] = frozenset()
    """Ops of other plugins that it has kernels for. These kernels are left out where nobody defines the op."""
