"""The plan's figures of each combination against the tensors of a real engine, place by place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from surogate_offload_host import surogate_offloader
from surogate_optimizer_adamw_8bit import surogate_optimizer as adamw_8bit
from tiny_qwen3 import make_engine, tiny_config
from torch import Tensor

from surogate_core.bundles import OffloaderSpec, TensorKind
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.prediction import predict
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_testing import tiny

CONFIG = tiny_config(hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=127)
CPU_TRAINING: tuple[TensorKind, ...] = ("weights", "master", "gradients", "optimizer")
FULL: dict[str, Any] = {"dtype": torch.bfloat16, "recompute": Recompute(block=False)}
LORA: dict[str, Any] = {**FULL, "lora": tiny.lora(8)}
COMBINATIONS: dict[str, tuple[tuple[TensorKind, ...], dict[str, Any]]] = {
    "nothing": ((), FULL),
    "residuals": (("residuals",), FULL),
    "recomputed residuals": (("residuals",), {**FULL, "recompute": Recompute(block=True)}),
    "optimizer": (("optimizer",), FULL),
    "8-bit optimizer": (("optimizer",), {**FULL, "optimizer": adamw_8bit()}),
    "master": (("master",), FULL),
    "gradients": (("gradients",), FULL),
    "optimizer and master": (("optimizer", "master"), {**FULL, "master_dtype": torch.bfloat16}),
    "all but weights": (("residuals", "optimizer", "master", "gradients"), FULL),
    "cpu_training": (CPU_TRAINING, {**FULL, "update_on_cpu": True}),
    "cpu_training, fp32": (CPU_TRAINING, {**FULL, "dtype": torch.float32, "update_on_cpu": True}),
    "cpu_training, residuals": ((*CPU_TRAINING, "residuals"), {**FULL, "update_on_cpu": True}),
    "lora": ((), LORA),
    "lora, weights": (("weights",), LORA),
    "lora, cpu_training, residuals": ((*CPU_TRAINING, "residuals"), {**LORA, "update_on_cpu": True}),
}


class Measured:
    """The bytes of an engine's tensors by the plan's kinds, and the most that its stores have in use."""

    def __init__(self, engine: Engine):
        parameters = engine.parameters
        rows: dict[str, int] = {
            "masters": sum(g.master.nbytes for g in parameters.groups),
            "gradients": sum(g.grad.nbytes for g in parameters.groups),
            "compute copies": sum(copy.nbytes for copy, _ in parameters.copies),
            "optimizer state": sum(t.nbytes for t in engine.optimizer.state().values()),
        }
        frozen: dict[str, Tensor] = {}
        for piece in parameters.pieces:
            for spec, tensor in zip(piece.specs, parameters.inputs(piece), strict=True):
                if not spec.trainable:
                    frozen[spec.hf_name] = tensor
            engine.stores.weights.release(piece.key)
        self.rows = rows | {"weights": sum(t.nbytes for t in frozen.values())}
        self.most: dict[str, int] = {}
        stores = {
            "weights": engine.stores.weights,
            "residuals": engine.stores.residuals,
            "gradients": engine.stores.gradients,
        }
        for kind, store in ((f"{name} in use", store) for name, store in stores.items()):
            self._watch(kind, store)
        self.kept = 0
        put = engine.stores.residuals.put

        def counted(key: str, tensors: Any) -> None:
            self.kept += sum(t.nbytes for t in tensors)
            put(key, tensors)

        engine.stores.residuals.put = counted  # type: ignore[method-assign]

    def _watch(self, kind: str, store: Any) -> None:
        fetch = store.fetch

        def fetched(key: str) -> Any:
            tensors = fetch(key)
            self.most[kind] = max(self.most.get(kind, 0), store.nbytes()["device"])
            return tensors

        store.fetch = fetched


def offloader(kinds: tuple[TensorKind, ...]) -> OffloaderSpec:
    return replace(surogate_offloader(), kinds=frozenset(kinds)) if kinds else NO_OFFLOAD


QUICK = ("residuals", "all but weights", "cpu_training", "lora, weights")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in COMBINATIONS])
def test_the_plan_counts_what_there_is(name: str) -> None:
    """Exactly where tensors are countable; the optimizer's state, of which the plan knows bytes a parameter, to 5 %."""
    kinds, settings = COMBINATIONS[name]
    engine = make_engine(CONFIG, offloader=offloader(kinds), **settings)
    measured = Measured(engine)
    prediction = predict(engine.assembly)
    held = {h.kind: h for h in prediction.held}
    engine.inputs.load(tiny.batch(tiny.documents([20, 12], vocabulary=127)), engine.seeds(0, 0), 1.0)
    with torch.no_grad():
        engine.step.train(True)

    def bytes_of(kind: str) -> int:
        return held[kind].nbytes if kind in held else 0

    for kind, nbytes in measured.rows.items():
        if kind == "optimizer state":
            assert bytes_of(kind) == pytest.approx(nbytes, rel=0.05)
        else:
            assert bytes_of(kind) == nbytes, kind
    assert bytes_of("residuals") == measured.kept
    for source in ("residuals", "weights", "gradients"):
        kind = f"{source} in use"
        if source in kinds:
            most = measured.most[kind]
            assert most <= bytes_of(kind) <= 1.05 * most, (kind, most, bytes_of(kind))
        else:
            assert kind not in held
    places: dict[str, tuple[TensorKind, ...]] = {
        "masters": ("master",),
        "gradients": ("gradients",),
        "optimizer state": ("optimizer",),
        "residuals": ("residuals",),
        "weights": ("weights",),
        "compute copies": ("weights",),
    }
    for kind, needed in places.items():
        if kind in held:
            assert held[kind].place == ("host" if set(needed) <= set(kinds) else "device"), kind
    assert prediction.total("host") == sum(h.nbytes for h in held.values() if h.place == "host")


@pytest.mark.slow
def test_moving_more_leaves_less_on_the_device() -> None:
    engine = make_engine(CONFIG, **FULL)
    totals = [
        predict(replace(engine.assembly, offloader=offloader(kinds))).total("device")
        for kinds in ((), ("optimizer",), ("optimizer", "master"), ("optimizer", "master", "gradients"))
    ]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
