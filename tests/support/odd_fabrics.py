"""Fabrics with faults. Processes of their own import this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surogate_core.bundles import Fabric, FabricContext, FabricSpec, NoOptions
from surogate_core.errors import MachineError
from surogate_core.mesh.auto import Auto
from surogate_core.mesh.groups import GroupFabric
from surogate_core.mesh.offers import FABRICS


class Careless(GroupFabric):
    """Every collective is wrong."""

    def __init__(self, options: NoOptions, context: FabricContext):
        super().__init__(context)

    def zeros(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.ones(elements, dtype=dtype)

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """Every rank gets what is for rank 0."""
        super().exchange([parts[0]] * len(parts), received_NK)

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Without the longest part."""
        length = min(part.numel() for part in parts)
        super().gather([part[:length] for part in parts])

    def add(self, values: Tensor) -> None:
        """In bf16."""
        rounded = values.bfloat16()
        super().add(rounded)
        values.copy_(rounded)

    def maximum(self, values: Tensor) -> None:
        """As floats, which loses NaN."""
        found = values.view(torch.float32).nan_to_num(0)
        super().add(found)
        values.copy_(found.view(torch.int32))

    def largest(self, values: Sequence[float]) -> list[float]:
        """The values of this rank alone, which is wrong."""
        return list(values)


class Unplugged(GroupFabric):
    """Opens the processes' group, and finds that it is of no use."""

    def __init__(self, options: NoOptions, context: FabricContext):
        super().__init__(context)

    def connect(self) -> None:
        super().connect()
        self.close()
        raise MachineError("there is no cable")


def second_choice(options: NoOptions, context: FabricContext) -> Fabric:
    """`auto`, whose first choice cannot connect."""
    first = FabricSpec(name="unplugged", build=Unplugged, priority=99)
    return Auto(options, replace(context, offers=(first, *FABRICS)))
