"""A run under native FP8 is saved and continues in another engine from its checkpoint's files, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_packs import triton_packs
from surogate_recipe_fp8 import FP8Options, surogate_recipe
from tiny_qwen3 import make_engine, tiny_config
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.engine.engine import Engine
from surogate_core.train.checkpoint import CheckpointDir
from surogate_testing import tiny
from surogate_testing.recipes import built

pytestmark = pytest.mark.gpu

TOKENS, BORDERS, HISTORY = 256, 8, 4
SAVED, STEPS = 6, 12
"""The ring is full and has been written over by then, before the save and after it."""
CONFIG = tiny_config(
    hidden_size=256, intermediate_size=512, head_dim=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=512
)


def engine(mode: str) -> Engine:
    """Sides that panels take, so that with LoRA a pack that multiplies adapted projections in FP8 has its part."""
    device = torch.device("cuda")
    recipe = built(surogate_recipe(), device, FP8Options(emulate="never", amax_history=HISTORY))
    return make_engine(
        CONFIG,
        device="cuda",
        tokens=TOKENS,
        borders=BORDERS,
        lora=tiny.lora(16, dropout=0.1) if mode == "lora" else None,
        source=tiny.random_source(std=0.05),
        packs=triton_packs(),
        recipe=recipe,
        dtype=torch.bfloat16,
        compiler="inductor",
        cuda_graphs=True,
    )


def batches(step: int) -> list[MicroBatch]:
    """Two micro-batches with padding."""
    documents = ([100, 1, 90, 40], [130, 17])
    return [
        tiny.batch(tiny.documents(lengths, vocabulary=512, seed=2 * step + i), tokens=TOKENS, borders=BORDERS)
        for i, lengths in enumerate(documents)
    ]


def train(made: Engine, steps: range) -> list[tuple[float, float]]:
    return [made.train_step(batches(step), step=step, lr=3e-3).read() for step in steps]


def live(made: Engine) -> dict[str, Tensor]:
    """Masters, the optimizer's state, ring and scales."""
    return {f"{file}/{name}": tensor.cpu() for file, named in made.state().items() for name, tensor in named.items()}


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_resumed_run_is_the_same_bit_for_bit(mode: str, tmp_path: Path) -> None:
    """Losses and norms of each step, weights, ring and scales; a lost scale or ring would be seen."""
    whole = engine(mode)
    losses = train(whole, range(SAVED))
    CheckpointDir(tmp_path, limit=1).save(SAVED, tensors=whole.state(), state={})
    losses += train(whole, range(SAVED, STEPS))
    checkpoint = CheckpointDir(tmp_path, limit=1).latest_good()
    assert checkpoint is not None
    saved = {group: checkpoint.tensors(group) for group in checkpoint.groups}

    resumed = engine(mode)
    assert bool(resumed.parameters.panels) == (mode == "lora")
    resumed.load_state(saved)
    assert train(resumed, range(SAVED, STEPS)) == losses[SAVED:]
    expected = live(whole)
    assert {"recipe/scales", "recipe/amax_history", "recipe/amax_position"} < expected.keys()
    for name, tensor in live(resumed).items():
        assert torch.equal(tensor, expected[name]), name

    for lost in ("scales", "amax_history"):
        resumed.load_state(saved)
        resumed.state()["recipe"][lost].zero_()
        assert train(resumed, range(SAVED, STEPS)) != losses[SAVED:], lost
