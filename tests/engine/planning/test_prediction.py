"""The plan's figures against the tensors of a real engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import decaying
import pytest
import surogate_offload_host as host
import torch
from mixture import CONFIG as MIXTURE
from mixture import Mixture
from tiny_qwen3 import make_engine

from surogate_core.bundles import Objective
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.prediction import in_allocator, predict
from surogate_core.engine.ranks.embedding_rows import EmbeddingRows
from surogate_core.engine.ranks.sharded_gradients import ShardedGradients
from surogate_core.engine.ranks.sharded_weights import ShardedWeights
from surogate_core.engine.schedule import EMBED
from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads


@pytest.mark.parametrize(
    ("adapters", "block", "dtype", "master_dtype"),
    [
        *((adapters, block, torch.float32, torch.float32) for adapters in (True, False) for block in (True, False)),
        (False, True, torch.float32, torch.bfloat16),
        (False, True, torch.bfloat16, torch.bfloat16),
    ],
)
def test_bytes_are_those_of_the_engine(
    adapters: bool, block: bool, dtype: torch.dtype, master_dtype: torch.dtype
) -> None:
    chosen = tiny.lora() if adapters else None
    engine = make_engine(lora=chosen, recompute=Recompute(block=block), dtype=dtype, master_dtype=master_dtype)
    prediction = predict(replace(engine.assembly, kernels=KernelTable.build(torch.device("cpu"), [TORCH_PACK])))
    held = {h.kind: h.nbytes for h in prediction.held}
    assert (prediction.parameters, prediction.trainable_parameters) == engine.parameters.counts()
    groups = engine.parameters.groups
    assert held["masters"] == sum(g.master.nbytes for g in groups)
    assert {g.master.dtype for g in groups} == {master_dtype}
    assert held.get("compute copies", 0) == sum(copy.nbytes for copy, _ in engine.parameters.copies)
    assert held["gradients"] == sum(g.grad.nbytes for g in groups)
    assert held.get("weights", 0) == engine.stores.weights.nbytes()["device"]
    assert prediction.schedule == engine.step.training
    assert set(prediction.kernels) <= set(engine.programs.kernels.chosen)

    batch = tiny.batch(tiny.documents([20, 12]))
    engine.inputs.load(batch, engine.seeds(0, 0), 1.0)
    kept = 0
    put = engine.stores.residuals.put

    def counted(key: str, tensors: object) -> None:
        nonlocal kept
        kept += sum(t.nbytes for t in tensors)  # type: ignore[attr-defined]
        put(key, tensors)  # type: ignore[arg-type]

    engine.stores.residuals.put = counted  # type: ignore[method-assign]
    with torch.no_grad():
        engine.step.train()
    assert held["residuals"] == kept > 0
    assert EMBED in {a.key for a in prediction.schedule}
    resting = sum(g.master.nbytes + g.grad.nbytes for g in groups) + sum(c.nbytes for c, _ in engine.parameters.copies)
    resting += engine.stores.weights.nbytes()["device"] + kept
    of_optimizer = sum(t.nbytes for t in engine.optimizer.state().values())
    moving = ("working set", "tables and inputs", "optimizer state", "freed memory")
    assert prediction.total("device") - sum(held[kind] for kind in moving) == resting
    logits = 32 * 61 * dtype.itemsize
    assert held["freed memory"] >= logits, "one of the largest tensors is there once more"
    assert held["optimizer state"] == pytest.approx(of_optimizer, abs=16)
    assert prediction.total("host") == held["libraries"]


@pytest.mark.parametrize(("mib", "taken"), [(1, 1), (9, 9), (17, 18), (18, 18), (16.5, 16.5), (33, 34)])
def test_what_the_allocator_does_not_split_off(mib: float, taken: float) -> None:
    assert in_allocator(int(mib * 2**20)) == int(taken * 2**20)


HOST = replace(host.surogate_offloader(), kinds=frozenset({"weights", "master", "optimizer"}))
ALL = replace(host.surogate_offloader(), kinds=frozenset({"weights", "master", "optimizer", "gradients"}))
MANY_ROWS = {**tiny.SMALL_CONFIG, "tie_word_embeddings": False, "vocab_size": 256}
"""The rows of four micro-batches are few, and the head is not tied."""
SCORED = {**MANY_ROWS, "architectures": ["ConformanceForSequenceClassification"]}
SCORES = Objective(name="scores", token_loss=lambda logits, labels, columns: logits[:, 0].float().square())
EIGHT = {**MIXTURE, "num_experts": 8}
RANKS: dict[str, tuple[bool, int, dict[str, Any]]] = {
    "lora": (True, 2, {"exact": True}),
    "level 0": (False, 3, {"zero_level": 0}),
    "level 1": (False, 2, {"zero_level": 1, "exact": True}),
    "level 1 in bf16": (False, 4, {"zero_level": 1, "dtype": torch.bfloat16, "master_dtype": torch.bfloat16}),
    "level 2": (False, 2, {"zero_level": 2, "exact": True}),
    "level 1, weights": (False, 3, {"zero_level": 1, "shard_weights": True}),
    "level 1, weights, exact": (False, 2, {"zero_level": 1, "shard_weights": True, "exact": True}),
    "level 3": (False, 3, {"zero_level": 3, "shard_weights": True}),
    "shared base": (True, 2, {"shard_weights": True}),
    "level 1, weights on the host": (False, 2, {"zero_level": 1, "shard_weights": True, "offloader": HOST}),
    "level 3 on the host": (False, 2, {"zero_level": 3, "shard_weights": True, "offloader": HOST}),
    "cpu_training": (False, 2, {"zero_level": 3, "shard_weights": True, "offloader": ALL, "update_on_cpu": True}),
    "shared base, cpu_training": (True, 2, {"shard_weights": True, "offloader": ALL, "update_on_cpu": True}),
    "cpu_training in bf16": (
        False,
        4,
        {
            "zero_level": 3,
            "shard_weights": True,
            "offloader": ALL,
            "update_on_cpu": True,
            "dtype": torch.bfloat16,
            "master_dtype": torch.bfloat16,
        },
    ),
    "replicas, level 1": (False, 4, {"zero_level": 1, "exact": True, "shard_ranks": 2}),
    "replicas, level 1, weights": (False, 4, {"zero_level": 1, "shard_weights": True, "shard_ranks": 2}),
    "replicas, level 3": (False, 4, {"zero_level": 3, "shard_weights": True, "shard_ranks": 2}),
    "replicas, level 2, exact": (False, 4, {"zero_level": 2, "exact": True, "shard_ranks": 2}),
    "experts": (False, 4, {"zero_level": 1, "build": Mixture, "config": MIXTURE, "expert": 2}),
    "adapters of experts": (True, 4, {"build": Mixture, "config": EIGHT, "expert": 4}),
    "even loads": (True, 4, {"build": Mixture, "config": EIGHT, "expert": 4, "expert_balance": 1.0}),
    "even loads, rows": (
        False,
        4,
        {"build": Mixture, "config": EIGHT, "expert": 2, "expert_balance": 1.0, "expert_rows": True},
    ),
    "rows of the embedding": (False, 4, {"zero_level": 3, "config": MANY_ROWS, "dtype": torch.bfloat16}),
    "rows of the embedding, replicas": (False, 4, {"zero_level": 2, "config": MANY_ROWS, "shard_ranks": 2}),
    "rows of the embedding, score head": (False, 2, {"zero_level": 2, "config": SCORED, "objective": SCORES}),
    "fp32 parameters": (
        False,
        2,
        {"zero_level": 1, "build": decaying.Decaying, "dtype": torch.bfloat16, "master_dtype": torch.bfloat16},
    ),
    "fp32 parameters, level 3 on the host": (
        False,
        2,
        {
            "zero_level": 3,
            "shard_weights": True,
            "offloader": HOST,
            "build": decaying.Decaying,
            "dtype": torch.bfloat16,
            "master_dtype": torch.bfloat16,
        },
    ),
    "fp32 parameters, cpu_training": (
        False,
        2,
        {
            "zero_level": 3,
            "shard_weights": True,
            "offloader": ALL,
            "update_on_cpu": True,
            "build": decaying.Decaying,
            "dtype": torch.bfloat16,
        },
    ),
    "fp32 parameters, shared base": (
        True,
        2,
        {"shard_weights": True, "build": decaying.Decaying, "dtype": torch.bfloat16},
    ),
    "shared base of replicas": (True, 4, {"shard_weights": True, "shard_ranks": 2}),
    "shared base on the host": (True, 4, {"shard_weights": True, "offloader": HOST}),
}


def _added_at_once(rows: EmbeddingRows) -> int:
    """Bytes of one rank's rows in fp32."""
    return 4 * rows.buffers[1][0].numel()


def _kept(weights: Any) -> int:
    """Bytes of the frozen weights of a rank, on the device or in host memory."""
    inner = getattr(weights, "_inner", None)
    if inner is None:
        slots = weights._slots if isinstance(weights, ShardedWeights) else []
        return int(weights.nbytes()["device"]) - sum(slot.buffer.nbytes for slot in slots)
    homes = {home.data_ptr(): home.nbytes for several in inner._homes.values() for home in several}
    return sum(homes.values())


@pytest.mark.slow_cases("lora", "level 0", "level 1 in bf16", "level 2", "shared base on the host")
@pytest.mark.slow_cases("level 1, weights, exact", "level 1, weights on the host")
@pytest.mark.slow_cases("cpu_training in bf16", "shared base, cpu_training", "even loads")
@pytest.mark.slow_cases(*(name for name in RANKS if name.startswith("fp32 parameters, ")))
@pytest.mark.slow_cases("adapters of experts", "even loads, rows")
@pytest.mark.parametrize(("adapters", "ranks", "keys"), RANKS.values(), ids=list(RANKS))
def test_bytes_of_a_rank_are_those_of_its_engine(adapters: bool, ranks: int, keys: dict[str, Any]) -> None:
    micro_batches = 12 if ranks == 3 else 8

    parts = {"optimizer": tiny.ADAMW, "build": tiny.SmallModel, "lora": tiny.lora() if adapters else None, **keys}
    config = parts.pop("config", tiny.SMALL_CONFIG)
    assembly = tiny.assembly(config, ranks=ranks, micro_batches=micro_batches, **parts)

    def work(fabric: VirtualFabric) -> dict[str, int]:
        engine = Engine(assembly, tiny.random_source(), mesh=fabric.mesh())
        mine = engine.sharing.share(micro_batches).numbers
        batches = [b if n in mine else b.counts() for n, b in enumerate(tiny.batches(0, micro_batches))]
        engine.train_step(batches, step=0, lr=1e-2)
        sharded, parameters = engine.parameters.sharded, engine.parameters
        copies = [copy for copy, _ in parameters.copies]
        copies += [] if sharded is None else list(sharded._copies.values())
        owned = [] if sharded is None else [sharded.sums]
        weights, gradients = engine.stores.weights, engine.stores.gradients
        rooms = gradients._rooms.values() if isinstance(gradients, ShardedGradients) else ()
        slots = weights._slots if isinstance(weights, ShardedWeights) else []
        moved = assembly.offloader.moves("weights")
        received = gradients._staging if isinstance(gradients, ShardedGradients) else None
        rows = engine.stores.embedding_rows
        return {
            "weights": _kept(weights) if adapters else 0,
            "masters": sum(group.master.nbytes for group in parameters.groups),
            "gradients": sum(sums.nbytes for sums in [*parameters.flat.kept_by_all, *owned]),
            "compute copies": sum(copy.nbytes for copy in copies),
            "partial sums": sum(t.nbytes for sums in [*engine._lanes._levels, engine._lanes._total] for t in sums),
            "received gradients": engine.traffic._staging.nbytes + (0 if received is None else received.nbytes),
            "received rows": 0 if rows is None else sum(b.nbytes for b in rows.buffers) + _added_at_once(rows),
            "whole gradients": sum(room.buffer.nbytes for several in rooms for room in several),
            # On a GPU a rank's part is copied from the host to the device before it is gathered.
            "gathered weights": sum(s.buffer.nbytes for s in slots) + (slots[0].buffer.nbytes // ranks if moved else 0),
        }

    found = in_threads(ranks, work)[0]
    prediction = predict(replace(assembly, kernels=KernelTable.build(torch.device("cpu"), [TORCH_PACK])))
    of_kind = {kind: sum(h.nbytes for h in prediction.held if h.kind == kind) for kind in [*found, "whole copies"]}
    of_kind["compute copies"] += of_kind.pop("whole copies")
    assert of_kind == found
    assert prediction.ranks == ranks
    assert prediction.sent
