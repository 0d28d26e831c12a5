"""The device store, and an engine on stores that move and forget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_qwen3 import StrictStore, make_engine, strict_offloader

from surogate_core.bundles import GradientStore, OffloaderSpec, Stores, TensorKind
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.placement import Placement
from surogate_core.engine.stores import NO_OFFLOAD, DeviceStore, ExpertsApart
from surogate_core.errors import PluginError, UserError
from surogate_testing import tiny


def test_the_device_store_keeps_what_it_was_given() -> None:
    store = DeviceStore("weights")
    tensors = [torch.ones(3), torch.zeros(2)]
    store.put("layer 0", tensors)
    store.prefetch("layer 0")
    for _ in range(2):
        assert all(a is b for a, b in zip(store.fetch("layer 0"), tensors, strict=True))
        store.release("layer 0")


def test_residuals_are_forgotten() -> None:
    store = DeviceStore("residuals")
    store.put("layer 0", [torch.ones(3)])
    assert store.nbytes() == {"device": 12, "host": 0, "disk": 0}
    store.release("layer 0")
    assert store.nbytes()["device"] == 0
    with pytest.raises(KeyError):
        store.fetch("layer 0")


def test_shared_storage_counts_once() -> None:
    store = DeviceStore("weights")
    whole = torch.ones(8)
    store.put("embed", [whole])
    store.put("head", [whole[:4], whole[4:], torch.ones(1)])
    assert store.nbytes()["device"] == 36


def test_no_offload_stores_every_kind_on_the_device() -> None:
    stores = NO_OFFLOAD.build(NO_OFFLOAD.options(), "", torch.device("cpu"))
    for kind in NO_OFFLOAD.kinds:
        assert isinstance(stores.store(kind), DeviceStore)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_an_engine_on_stores_that_move_and_forget(adapters: bool, recompute: bool) -> None:
    """Fetched tensors are copies that become NaN when released: nothing may be read outside fetch and release."""
    documents = tiny.documents([11, 9])
    batches = [tiny.batch(documents), tiny.batch(documents[:1])]
    settings = {"recompute": Recompute(block=recompute), "head_chunks": 2}
    settings["lora"] = tiny.lora(dropout=0.2) if adapters else None
    plain = make_engine(**settings)
    offloader, stores = strict_offloader()
    engine = make_engine(offloader=offloader, **settings)
    expected, found = tiny.gradients(plain, batches), tiny.gradients(engine, batches)
    assert all(torch.equal(found[name], g) for name, g in expected.items())
    assert engine.evaluate(batches) == plain.evaluate(batches)
    for step in range(2):
        results = [e.train_step(batches, step=step, lr=1e-2).read() for e in (plain, engine)]
        assert results[0] == results[1]
    if adapters:
        exported = [{n: t.clone() for n, t in e.parameters.base_tensors()} for e in (plain, engine)]
        assert all(torch.equal(exported[1][name], t) for name, t in exported[0].items())
    assert not any(store.out for store in stores.values()), "fetched and not released"
    assert not stores["residuals"].held


def test_the_engine_asks_the_stores_what_the_schedule_says() -> None:
    offloader, stores = strict_offloader()
    engine = make_engine(offloader=offloader, lora=tiny.lora())
    for store in stores.values():
        store.log.clear()
    engine.accumulate([tiny.batch(tiny.documents([11, 9]))])
    for kind, store in stores.items():
        said = [(a.verb, a.key) for a in engine.step.training if a.kind == kind]
        assert store.log == said


def test_an_offloader_without_a_store_of_gradients_is_told_so() -> None:
    class Old(Stores):
        def store(self, kind: TensorKind) -> DeviceStore:
            return DeviceStore(kind)

    kinds: frozenset[TensorKind] = frozenset({"gradients"})
    offloader = OffloaderSpec(name="old", kinds=kinds, place="host", build=lambda *a: Old(), allocates=True)
    with pytest.raises(UserError, match=r"offload=old: .*GradientStore.*Fix: set offload_grads=false"):
        Placement(offloader=offloader, stores=Old(), device=torch.device("cpu")).gradients()


def test_a_store_of_another_class_is_the_plugins_fault() -> None:
    class Bare(Stores):
        def store(self, kind: TensorKind) -> Any:
            return object()

    kinds: frozenset[TensorKind] = frozenset({"weights"})
    offloader = OffloaderSpec(name="bare", kinds=kinds, place="host", build=lambda *a: Bare())
    with pytest.raises(PluginError, match=r"offload=bare: its store of weights is no bundles\.Store .*Fix: derive"):
        Placement(offloader=offloader, stores=Bare(), device=torch.device("cpu")).store("weights")


def test_experts_apart_are_among_their_keys_tensors_again_and_both_stores_begin_a_pass() -> None:
    stores = StrictStore("weights"), StrictStore("weights")
    passes: list[int] = []
    for number, store in enumerate(stores):
        store.begin_pass = lambda number=number: passes.append(number)  # type: ignore[method-assign]
    apart = ExpertsApart(*stores, {"layer 0": (1, 2), "head": ()})
    tensors = [torch.full((2,), float(i)) for i in range(4)]
    apart.put("layer 0", tensors)
    apart.put("head", tensors[:1])
    apart.begin_pass()
    assert passes == [0, 1]
    assert [t[0].item() for t in apart.fetch("layer 0")] == [0, 1, 2, 3]
    assert [len(store.held.get("layer 0", ())) for store in stores] == [2, 2]
    assert [len(store.held.get("head", ())) for store in stores] == [1, 0]


def test_only_sums_that_ranks_share_out_are_written() -> None:
    store = NO_OFFLOAD.build(None, "", torch.device("cpu")).store("gradients")
    assert isinstance(store, GradientStore)
    store.put("layer 0", [torch.zeros(2)])
    assert not any(store.written("layer 0"))
