"""The choice of a fabric, and what happens when the first choice cannot connect the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surogate_core.bundles import Fabric, FabricContext, FabricSpec, NoOptions
from surogate_core.errors import MachineError
from surogate_core.mesh.auto import Auto
from surogate_core.mesh.offers import FABRICS

HERE = FabricContext(
    rank=0,
    world=2,
    near=2,
    device=torch.device("cpu"),
    store=dist.HashStore(),
    gather=lambda value: [value, value],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    works: bool = True


class Named(Fabric):
    """Says its name in `largest`, and has memory of its own."""

    note = ""

    def __init__(self, name: str, works: bool, context: FabricContext):
        self.name, self.works, self.context = name, works, context
        self.state = "built"
        self.asked = 0

    def connect(self) -> None:
        if not self.works:
            raise MachineError(f"{self.name} has no cable.")
        self.state = "connected"
        self.context.store.set("met", self.name)

    def zeros(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.asked += 1
        return torch.zeros(elements, dtype=dtype)

    @property
    def memory(self) -> int:
        return self.asked

    def largest(self, values: Any) -> list[Any]:
        return [self.name]

    def close(self) -> None:
        self.state = "closed"


def spec(
    name: str,
    priority: int | None,
    *,
    works: bool = True,
    supports: Callable[[str, int, int], bool] = lambda device, near, world: True,
    made: list[Named] | None = None,
) -> FabricSpec:
    def build(options: Options, context: FabricContext) -> Fabric:
        assert options == Options()
        found = Named(name, works, context)
        if made is not None:
            made.append(found)
        return found

    return FabricSpec(name=name, build=build, supports=supports, priority=priority, options=Options)


def auto(*offers: FabricSpec, **context: Any) -> Auto:
    return Auto(NoOptions(), replace(HERE, offers=offers, **context))


def chosen(*offers: FabricSpec, **context: Any) -> Any:
    found = auto(*offers, **context)
    found.connect()
    return found.largest([])[0]


def test_the_highest_priority_that_supports_the_ranks_is_chosen() -> None:
    local = spec("local", 30, supports=lambda device, near, world: near == world)
    gpus = spec("gpus", 20, supports=lambda device, near, world: device == "cuda")
    offers = (spec("named_only", None), spec("b", 5), spec("a", 5), gpus, local)
    assert chosen(*offers) == "local"
    assert chosen(*offers, world=4) == "a"
    assert chosen(*offers, world=4, device=torch.device("cuda")) == "gpus"


def test_the_next_one_is_used_if_the_first_cannot_connect() -> None:
    made: list[Named] = []
    found = auto(spec("first", 2, works=False, made=made), spec("second", 1, made=made))
    assert found.zeros(4, torch.float32) is not None
    assert [one.name for one in made] == ["first"], "what is not needed is built"
    found.connect()
    assert found.note == "fabric=second is in use, which may be slower than first: first has no cable."
    # What is allocated after that, such as a store's buffers.
    found.zeros(4, torch.float32)
    assert [one.asked for one in made] == [1, 1]
    assert found.memory == 2
    assert HERE.store.get("second/met") == b"second", "each has keys of its own in the store"
    found.close()
    assert made[1].state == "closed"


def test_the_last_failure_is_the_runs() -> None:
    with pytest.raises(MachineError, match="second has no cable"):
        auto(spec("first", 2, works=False), spec("second", 1, works=False)).connect()


def test_a_torch_without_collectives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert auto(*FABRICS).note == ""
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    with pytest.raises(MachineError, match=r"gpus=2: torch .* has no gloo, .* Fix: gpus=1"):
        auto(*FABRICS)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(MachineError, match="has no NCCL"):
        auto(*FABRICS, device=torch.device("cuda"))


def test_the_cores_own_fabrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy engines where ranks are on one machine, NCCL where none are, gloo on CPUs."""
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    able = {
        place: [s.name for s in FABRICS if s.priority is not None and s.supports(*place)]
        for place in (("cuda", 4, 4), ("cuda", 2, 4), ("cuda", 1, 4), ("cuda", 0, 4), ("cpu", 4, 4), ("cpu", 1, 4))
    }
    assert list(able.values()) == [["copy_engines", "nccl"]] * 2 + [["nccl"]] * 2 + [["gloo"]] * 2
    priorities = {s.name: s.priority for s in FABRICS}
    assert priorities == {"auto": None, "copy_engines": 20, "nccl": 10, "gloo": 10}
