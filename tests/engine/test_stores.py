"""The device store, and an engine on stores that move and forget."""

from __future__ import annotations

import pytest
import torch
from tiny_qwen3 import make_engine, strict_offloader

from surogate_core.bundles import OffloaderSpec, Stores, TensorKind
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.placement import Placement
from surogate_core.engine.stores import NO_OFFLOAD, DeviceStore
from surogate_core.errors import UserError
from surogate_core.testing import tiny


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
