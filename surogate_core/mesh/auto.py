"""`fabric=auto`: the fastest fabric that connects the ranks of a run."""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric, FabricContext, FabricSpec
from surogate_core.bundles.options import NoOptions
from surogate_core.errors import MachineError
from surogate_core.mesh.delegate import Delegate

log = structlog.get_logger(__name__)


class Auto(Delegate):
    """Tries the fabrics that support the ranks, by their priorities, until one connects."""

    def __init__(self, options: NoOptions, context: FabricContext):
        """Raises `MachineError` if no fabric supports the ranks."""
        self.rank, self.world = context.rank, context.world
        self._context = context
        able = [(s.priority, s) for s in context.offers if s.priority is not None]
        able = [(p, s) for p, s in able if s.supports(context.device.type, context.near, context.world)]
        self._left = [spec for _, spec in sorted(able, key=lambda found: (-found[0], found[1].name))]
        if not self._left:
            library = "NCCL" if context.device.type == "cuda" else "gloo"
            raise MachineError(
                f"gpus={context.world}: torch {torch.__version__} has no {library}, which connects the processes of a "
                f"run. Fix: gpus=1, or a torch for Linux from PyTorch's own index."
            )
        self._built: list[Fabric] = []
        """The last one is in use. Memory of the earlier ones may be in use too."""
        self._chosen = self._take_next()

    def _take_next(self) -> FabricSpec:
        spec = self._left.pop(0)
        # What one that failed has left in the store must not meet the next one.
        own = replace(self._context, store=dist.PrefixStore(spec.name, self._context.store))
        self._built.append(spec.build(spec.options(), own))
        return spec

    def _now(self) -> Fabric:
        return self._built[-1]

    def connect(self) -> None:
        """As `Fabric.connect`."""
        while True:
            try:
                self._now().connect()
            except MachineError as error:
                if not self._left:
                    raise
                failed = self._chosen.name
                self._chosen = self._take_next()
                self.note = f"fabric={self._chosen.name} is in use, which may be slower than {failed}: {error}"
            else:
                self.note = self.note or self._now().note
                log.info("fabric", chosen=self._chosen.name)
                return

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """As `Fabric.zeros`."""
        return self._now().zeros(elements, dtype)

    @property
    def memory(self) -> int:
        """As `Fabric.memory`."""
        return sum(fabric.memory for fabric in self._built)
