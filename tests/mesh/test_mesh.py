"""Memory and connections of a rank."""

from __future__ import annotations

import ast
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surogate_core.bundles import Fabric, FabricContext
from surogate_core.mesh.mesh import CalledOff, Mesh

CPU = torch.device("cpu")


class Own(Fabric):
    """A fabric with memory of its own, which moves nothing."""

    def __init__(self, context: FabricContext):
        self.context, self.allocated, self.state = context, 0, "built"

    def connect(self) -> None:
        self.state = "connected"

    def zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocated += elements * dtype.itemsize
        return torch.zeros(elements, dtype=dtype)

    @property
    def memory(self) -> int:
        return self.allocated

    def close(self) -> None:
        self.state = "closed"


def test_the_fabric_allocates_before_and_after_it_is_connected() -> None:
    mesh = Mesh(rank=0, world=2, local_world=1, store=dist.HashStore(), swap=lambda value: [value, value])
    built: list[Own] = []
    mesh.choose(lambda context: built.append(Own(context)) or built[0], CPU)  # type: ignore[func-returns-value]
    (fabric,) = built
    assert (fabric.context.rank, fabric.context.world, fabric.context.near) == (0, 2, 0)
    for here, near in ((2, 2), (4, 4)):
        other = Mesh(rank=0, world=4, local_world=here, near=2, store=dist.HashStore())
        other.choose(Own, CPU)
        assert isinstance(other._built, Own)
        assert other._built.context.near == near
    assert mesh.zeros(3, torch.bfloat16, CPU).tolist() == [0, 0, 0]
    assert mesh.zeros(0, torch.bfloat16, CPU).tolist() == []
    assert mesh.zeros(5, torch.bfloat16, torch.device("meta")).is_meta
    assert (fabric.state, mesh.fabric, mesh.memory) == ("built", None, 6)
    mesh.connect(CPU)
    mesh.zeros(1, torch.float32, CPU)
    assert (fabric.state, mesh.fabric, mesh.memory) == ("connected", fabric, 10)
    mesh.close()
    assert (fabric.state, mesh.fabric, mesh.memory) == ("closed", None, 0)


def test_one_rank_builds_no_fabric() -> None:
    """Nor does it import any."""
    code = (
        "import sys, torch\n"
        "from surogate_core.mesh.mesh import Mesh\n"
        "mesh = Mesh()\n"
        "mesh.zeros(3, torch.float32, torch.device('cpu'))\n"
        "mesh.connect(torch.device('cpu'))\n"
        "assert mesh.fabric is None and mesh.largest([1.0]) == [1.0]\n"
        "mesh.close()\n"
        "print([name for name in sys.modules if name.startswith('surogate_core.mesh')])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = {f"surogate_core.mesh{name}" for name in ("", ".delegate", ".lifeline", ".mesh")}
    assert set(ast.literal_eval(found)) == modules


def test_what_waits_for_rank_0_is_called_off() -> None:
    told: set[str] = set()
    store: Any = SimpleNamespace(set=lambda key, value: told.add(key), check=lambda keys: told >= set(keys))
    first, second = (Mesh(rank=rank, world=2, store=store) for rank in range(2))
    with first.first("data"):
        assert not told
    second.wait_for("data")
    first.call_off()
    second.wait_for("data")
    for wait in (lambda: second.wait_for("compiled"), lambda: second.gather(1)):
        with pytest.raises(CalledOff):
            wait()
