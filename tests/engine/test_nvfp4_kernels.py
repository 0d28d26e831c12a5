"""Training in emulated NVFP4 with the CUDA kernels: losses of the references to the last bit.

Without a GPU the kernels' source runs on the host.
"""

from __future__ import annotations

from typing import Any

import pytest
import surogate_kernels_cuda
import torch
from surogate_kernels_cuda import nvfp4
from surogate_recipe_nvfp4 import surogate_recipe
from tiny_qwen3 import make_engine

from surogate_core.bundles import Kernel, KernelPack
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import host_cuda, tiny
from surogate_testing.recipes import built

TOKENS = 40
"""No multiple of 16: some operands are padded."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    host_cuda.device_for(name, nvfp4, "nvfp4", surogate_kernels_cuda.unavailable, monkeypatch)
    return name


def pack() -> KernelPack:
    """The kernels for NVFP4 alone, on whatever device."""

    def kernels() -> tuple[Kernel, ...]:
        functions = {"nvfp4_quantised": nvfp4.nvfp4_quantised, "nvfp4_rounded": nvfp4.nvfp4_rounded}
        return tuple(
            Kernel(op=op, name="cuda", function=function, supports=lambda device, dtype: True)
            for op, function in functions.items()
        )

    return KernelPack(name="nvfp4", kernels=kernels)


def engine(device: str, *, kernels: bool, full: bool, **settings: Any) -> Engine:
    return make_engine(
        tiny.SMALL_CONFIG,
        build=tiny.SmallModel,
        device=device,
        tokens=TOKENS,
        lora=None if full else tiny.lora(8, dropout=0.1),
        packs=[TORCH_PACK, pack()] if kernels else [TORCH_PACK],
        recipe=built(surogate_recipe(), torch.device(device)),
        **{"dtype": torch.bfloat16, "cuda_graphs": device == "cuda", **settings},
    )


def train(made: Engine, steps: int) -> list[tuple[float, float]]:
    batch = tiny.batch(tiny.documents([28, 12], seed=0), tokens=TOKENS)
    return [made.train_step([batch], step=step, lr=3e-3).read() for step in range(steps)]


@pytest.mark.slow
@pytest.mark.slow_cases("cpu-lora")
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_losses_are_those_of_the_references(device: str, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set[Any]()
    round_to = nvfp4._round

    def recorded(x: Any, seed: Any, how: Any, **to: Any) -> Any:
        launched.add(how)
        return round_to(x, seed, how, **to)

    monkeypatch.setattr(nvfp4, "_round", recorded)
    # On the host a launch takes long.
    steps = 4 if device == "cuda" else 1
    found = train(engine(device, kernels=True, full=full), steps)
    assert {how.salt for how in launched} > {0}, "gradients are rounded by the kernels too"
    assert any(how.rotated for how in launched) == full
    assert found == train(engine(device, kernels=False, full=full), steps)
    if device == "cuda":
        assert found == train(engine(device, kernels=True, full=full, recompute=Recompute(block=True)), steps)


@pytest.mark.gpu
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_compiled_blocks_train(full: bool) -> None:
    """Inductor keeps values between ops in fp32 that eager rounds to bf16, so losses are near and not equal."""
    reason = surogate_kernels_cuda.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    losses = {
        compiler: [loss for loss, _ in train(engine("cuda", kernels=True, full=full, compiler=compiler), 8)]
        for compiler in ("inductor", "fx")
    }
    assert losses["inductor"] == pytest.approx(losses["fx"], rel=0.02)
