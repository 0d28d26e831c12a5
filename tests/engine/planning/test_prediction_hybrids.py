"""The plan's figures of hybrids against the tensors of a real engine."""

from __future__ import annotations

from dataclasses import replace

import hybrids
import pytest
import torch

from surogate_core.dsl.trace import Recompute
from surogate_core.engine.planning.prediction import predict
from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("block", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", hybrids.CONFIGS)
def test_bytes_are_those_of_the_engine(name: str, block: bool, adapters: bool) -> None:
    lora = tiny.lora() if adapters else None
    engine = hybrids.engine(name, recompute=Recompute(block=block), dtype=torch.bfloat16, lora=lora)
    prediction = predict(replace(engine.assembly, kernels=KernelTable.build(torch.device("cpu"), [TORCH_PACK])))
    held = {one.kind: one.nbytes for one in prediction.held}
    groups = engine.parameters.groups
    assert (prediction.parameters, prediction.trainable_parameters) == engine.parameters.counts()
    assert held["masters"] == sum(group.master.nbytes for group in groups)
    assert held["gradients"] == sum(group.grad.nbytes for group in groups)
    assert held.get("weights", 0) == engine.stores.weights.nbytes()["device"]
    engine.inputs.load(tiny.batch(tiny.documents([20, 12])), engine.seeds(0, 0), 1.0)
    kept, put = [], engine.stores.residuals.put

    def counted(key: str, tensors: list[torch.Tensor]) -> None:
        kept.append(sum(tensor.nbytes for tensor in tensors))
        put(key, tensors)

    engine.stores.residuals.put = counted
    with torch.no_grad():
        engine.step.train()
    assert held["residuals"] == sum(kept) > 0
