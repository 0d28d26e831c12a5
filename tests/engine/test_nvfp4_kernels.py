"""Training in emulated NVFP4 with the CUDA kernels: losses of the references to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import surogate_kernels_cuda
import torch
from surogate_kernels_cuda import nvfp4
from surogate_recipe_nvfp4 import NVFP4Options, surogate_recipe
from tiny_engine import lora, make_batch, make_engine, random_documents, tiny_config

from surogate_core.bundles import KernelPack, RecipeSettings
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.kernels.attention import TORCH_PACK

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CONFIG = tiny_config(hidden_size=128, intermediate_size=256, vocab_size=512, head_dim=32)
PACK = KernelPack(name="nvfp4", kernels=nvfp4.kernels, unavailable=surogate_kernels_cuda.unavailable)
TOKENS = 240
"""No multiple of 32 and of 16 blocks: some operands are padded."""


def engine(*, kernels: bool, full: bool, compiler: str = "fx", recompute: bool = False) -> Engine:
    recipe, device = surogate_recipe(), torch.device("cuda")
    return make_engine(
        CONFIG,
        device="cuda",
        tokens=TOKENS,
        lora=None if full else lora(8, dropout=0.1),
        packs=[TORCH_PACK, PACK] if kernels else [TORCH_PACK],
        recipe=recipe,
        recipe_options=recipe.prepare(NVFP4Options(), RecipeSettings(), device),
        recompute=Recompute(block=recompute),
        dtype=torch.bfloat16,
        compiler=compiler,
        cuda_graphs=True,
    )


def train(made: Engine, steps: int = 4) -> list[tuple[float, float]]:
    batches = [make_batch(random_documents([TOKENS - 40, 40], vocab=509, seed=i), tokens=TOKENS) for i in range(2)]
    return [made.train_step(batches, step=step, lr=3e-3).read() for step in range(steps)]


@pytest.fixture(autouse=True)
def _needs_the_pack() -> None:
    reason = surogate_kernels_cuda.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_losses_are_those_of_the_references(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set[Any]()
    round_to = nvfp4._round
    monkeypatch.setattr(
        nvfp4, "_round", lambda x, seed, how, **to: (launched.add(how), round_to(x, seed, how, **to))[1]
    )
    found = train(engine(kernels=True, full=full))
    assert {how.salt for how in launched} > {0}, "gradients are rounded by the kernels too"
    assert any(how.rotated for how in launched) == full
    assert found == train(engine(kernels=False, full=full))
    assert found == train(engine(kernels=True, full=full, recompute=True))


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_compiled_blocks_train(full: bool) -> None:
    """Inductor keeps values between ops in fp32 that eager rounds to bf16, so losses are near and not equal."""
    compiled = [loss for loss, _ in train(engine(kernels=True, full=full, compiler="inductor"), 8)]
    eager = [loss for loss, _ in train(engine(kernels=True, full=full), 8)]
    assert compiled == pytest.approx(eager, rel=0.02)
