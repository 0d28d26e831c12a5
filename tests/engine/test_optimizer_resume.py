"""Each optimizer's state is loaded into a new engine and training continues bit for bit, on a GPU in graphs."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import surogate_kernels_cuda
import surogate_kernels_triton
import surogate_optimizer_adamw
import surogate_optimizer_adamw_8bit
import surogate_optimizer_normuon
import torch
from tiny_qwen3 import make_engine, tiny_config
from torch import Tensor

from surogate_core.bundles import OptimizerSpec
from surogate_core.engine.engine import Engine
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny

SPECS: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        surogate_optimizer_adamw.surogate_optimizer(),
        surogate_optimizer_adamw_8bit.surogate_optimizer(),
        surogate_optimizer_normuon.surogate_optimizer(),
    )
}
CASES = [
    pytest.param(name, device, dtype, marks=pytest.mark.gpu if device == "cuda" else (), id=f"{name}-{device}-{dtype}")
    for name, device, dtype in product(SPECS, ("cpu", "cuda"), (torch.float32, torch.bfloat16))
]
# The embedding and the products of the layers have 4096 elements and more, the norms fewer.
CONFIG = tiny_config(hidden_size=64, intermediate_size=96, vocab_size=127)


PACKS = surogate_kernels_triton, surogate_kernels_cuda


def made(name: str, device: str, master: torch.dtype, *, graphs: bool = True) -> Engine:
    settings: dict[str, Any] = {}
    if device == "cuda":
        packs = [module.surogate_kernel_pack() for module in PACKS]
        settings = {"compiler": "inductor", "cuda_graphs": graphs, "packs": [TORCH_PACK, *packs]}
    return make_engine(
        CONFIG, device=device, optimizer=SPECS[name], dtype=torch.bfloat16, master_dtype=master, **settings
    )


def train(engine: Engine, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    found = []
    for step in steps:
        batches = [tiny.batch(tiny.documents((20, 9), vocabulary=127, seed=2 * step + i)) for i in range(2)]
        found.append(engine.train_step(batches, step=step, lr=1e-2).read())
    return found


def state(engine: Engine) -> dict[str, dict[str, Tensor]]:
    return {file: {n: t.cpu().clone() for n, t in named.items()} for file, named in engine.state().items()}


@pytest.mark.slow_cases("adamw-cpu-torch.bfloat16", "adamw_8bit-cpu-torch.float32", "normuon-cpu-torch.float32")
@pytest.mark.parametrize(("name", "device", "master"), CASES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name: str, device: str, master: torch.dtype) -> None:
    first = made(name, device, master)
    train(first, range(3))
    saved = state(first)
    expected = train(first, range(3, 6))
    second = made(name, device, master)
    second.load_state(saved)
    assert train(second, range(3, 6)) == expected
    mine, theirs = state(second), state(first)
    for file, named in theirs.items():
        assert mine[file].keys() == named.keys()
        assert not [n for n, t in named.items() if not torch.equal(mine[file][n], t)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_graphs_change_no_bit(name: str) -> None:
    found = []
    for graphs in (False, True):
        engine = made(name, "cuda", torch.bfloat16, graphs=graphs)
        found.append((train(engine, range(4)), state(engine)))
    assert found[0][0] == found[1][0]
    for file, named in found[0][1].items():
        assert not [n for n, t in named.items() if not torch.equal(found[1][1][file][n], t)]
