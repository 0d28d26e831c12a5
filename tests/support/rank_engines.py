"""Engines on virtual ranks, and what they train in the tests of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import decaying
import mixture
import torch
from surogate_quant_nf4 import NF4Options
from surogate_quant_nf4.nf4 import NF4
from torch import Tensor

from surogate_core.bundles import OptimizerSpec
from surogate_core.dsl.sides import RouterLosses
from surogate_core.engine.engine import Engine
from surogate_core.formats.adamw_8bit import BlockwiseAdamW
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads

EIGHT_BIT = OptimizerSpec(name="adamw-8bit", build=lambda groups, options: BlockwiseAdamW(groups))
UNTIED = {**tiny.SMALL_CONFIG, "tie_word_embeddings": False}
WIDE = {**tiny.SMALL_CONFIG, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
"""Matrices of 4096 elements and more, whose moments have 8 bits."""


def engine_of(fabric: VirtualFabric, *, micro_batches: int, node: int = 0, **changes: Any) -> Engine:
    """`node`: ranks of each machine, if there are several."""
    changes = {"optimizer": tiny.ADAMW, "build": tiny.SmallModel, **changes}
    config = changes.pop("config", tiny.SMALL_CONFIG)
    assembly = tiny.assembly(config, ranks=fabric.world, micro_batches=micro_batches, **changes)
    mesh = fabric.mesh(node) if fabric.world > 1 else None
    return Engine(assembly, tiny.random_source(), mesh=mesh)


def steps(engine: Engine, count: int, *, micro_batches: int, start: int = 0) -> list[tuple[Any, ...]]:
    """(loss, norm, side outputs) of each step; a rank gets counts of the others' micro-batches."""
    share = engine.sharing.share(micro_batches)
    found = []
    for step in range(start, start + count):
        batches = [b if n in share.numbers else b.counts() for n, b in enumerate(tiny.batches(step, micro_batches))]
        result = engine.train_step(batches, step=step, lr=1e-2)
        found.append((*result.read(), *(total.tolist() for _, total in result.sides().values())))
    return found


def trained(world: int, *, micro_batches: int = 8, count: int = 3, **changes: Any) -> tuple[Any, Mapping[str, Tensor]]:
    def work(fabric: VirtualFabric) -> tuple[Any, dict[str, Tensor]]:
        engine = engine_of(fabric, micro_batches=micro_batches, **changes)
        figures = steps(engine, count, micro_batches=micro_batches)
        return figures, tiny.whole_state(engine)

    results = in_threads(world, work)
    assert all(figures == results[0][0] for figures, _ in results)  # every rank knows the figures of the run
    return results[0]


CASES: dict[str, dict[str, Any]] = {
    "lora": {"lora": tiny.lora(dropout=0.1)},
    "level 0": {"zero_level": 0},
    "level 1": {"zero_level": 1},
    "level 1, head not tied": {"zero_level": 1, "config": UNTIED},
    "level 2": {"zero_level": 2},
    "level 3": {"zero_level": 3},
    "level 3, head not tied": {"zero_level": 3, "config": UNTIED},
    "level 1, weights": {"zero_level": 1, "shard_weights": True},
    "level 1, weights, head not tied": {"zero_level": 1, "shard_weights": True, "config": UNTIED},
    "lora on a sharded base": {"lora": tiny.lora(dropout=0.1), "shard_weights": True},
    "level 1 in 8 bits, bf16 masters": {
        "zero_level": 1,
        "config": WIDE,
        "optimizer": EIGHT_BIT,
        "master_dtype": torch.bfloat16,
    },
    "level 3 in 8 bits, bf16 masters": {
        "zero_level": 3,
        "config": WIDE,
        "optimizer": EIGHT_BIT,
        "master_dtype": torch.bfloat16,
        "dtype": torch.bfloat16,
    },
    "level 1, weights, in 8 bits, bf16 masters": {
        "zero_level": 1,
        "shard_weights": True,
        "config": WIDE,
        "optimizer": EIGHT_BIT,
        "master_dtype": torch.bfloat16,
        "dtype": torch.bfloat16,
    },
    "fp32 parameters, level 1": {"zero_level": 1, "build": decaying.Decaying, "dtype": torch.bfloat16},
    "fp32 parameters, level 3, bf16 masters": {
        "zero_level": 3,
        "build": decaying.Decaying,
        "optimizer": EIGHT_BIT,
        "master_dtype": torch.bfloat16,
        "dtype": torch.bfloat16,
    },
    "buffers, level 3": {"zero_level": 3, "build": decaying.Buffered, "dtype": torch.bfloat16},
    "buffers, level 1, weights": {
        "zero_level": 1,
        "shard_weights": True,
        "build": decaying.Buffered,
        "dtype": torch.bfloat16,
    },
    "fp32 parameters, lora on a sharded base": {
        "lora": tiny.lora(dropout=0.1),
        "shard_weights": True,
        "build": decaying.Decaying,
        "dtype": torch.bfloat16,
    },
    "experts, level 1": {
        "zero_level": 1,
        "build": mixture.Mixture,
        "config": mixture.CONFIG,
        "router_losses": RouterLosses(aux=0.1, z=0.01),
    },
    "experts, level 3": {
        "zero_level": 3,
        "build": mixture.Mixture,
        "config": mixture.CONFIG,
        "router_losses": RouterLosses(aux=0.1, form="layer"),
    },
    "experts, a counted step, level 1, weights": {
        "zero_level": 1,
        "shard_weights": True,
        "build": mixture.Mixture,
        "config": mixture.CONFIG,
        "router_losses": RouterLosses(aux=0.1),
    },
    "experts, a counted step, level 3": {
        "zero_level": 3,
        "build": mixture.Mixture,
        "config": mixture.CONFIG,
        "router_losses": RouterLosses(aux=0.1),
    },
    "experts in NF4, sharded": {
        "lora": tiny.lora(dropout=0.1),
        "shard_weights": True,
        "build": mixture.Mixture,
        "config": mixture.CONFIG,
        "weight_format": NF4(NF4Options()),
    },
    "experts, lora on a sharded base": {
        "lora": tiny.lora(dropout=0.1, expert_rank=2, train_router=True),
        "shard_weights": True,
        "build": mixture.Mixture,
        "config": mixture.CONFIG,
    },
}


@cache
def alone(case: str, *, micro_batches: int = 8, count: int = 3) -> tuple[Any, Mapping[str, Tensor]]:
    """The figures and the tensors of one rank."""
    return trained(1, exact=True, micro_batches=micro_batches, count=count, **CASES[case])
