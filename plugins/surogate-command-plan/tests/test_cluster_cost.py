"""The cost of a cluster that is not here: bytes on each wire, seconds, what is hidden."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from surogate_command_plan.cluster import Cluster, parse
from surogate_command_plan.cluster_cost import BASE, Cost, GpuWork, cost, flat, hierarchical
from surogate_command_plan.speed import CALL, HIDDEN, HIDDEN_NCCL, WAIT

from surogate_core.plugin import surogate as main
from surogate_core.service.engine import Sent, assembly

TABLE = ["sequence_len=2048", "per_device_train_batch_size=2", "recompute=false", "lmhead_chunks=4", "lora_dropout=0"]
MEASURED = [
    ("qwen3-0.6b", ["lora=true"], 126.2e3, 0.991),
    ("qwen3-0.6b", ["lora=true", "recipe=fp8-hybrid"], 147.0e3, 0.984),
    ("qwen3-8b", ["lora=true"], 17.1e3, 1.001),
    ("qwen3-8b", ["lora=true", "recipe=fp8-hybrid"], 26.2e3, 0.990),
    ("qwen3-8b", ["lora=false"], 12.0e3, 0.991),
    ("qwen3-8b", ["lora=false", "gradient_accumulation_steps=1"], 10.8e3, 0.977),
    ("qwen3-8b", ["lora=false", "gradient_accumulation_steps=1", "zero_level=2"], 10.5e3, 0.992),
    ("qwen3-8b", ["lora=false", "gradient_accumulation_steps=1", "zero_level=3"], 10.8e3, 0.955),
    ("qwen3-8b", ["lora=false", "zero_level=3"], 11.9e3, 0.926),
    ("qwen3-4b", ["lora=false", "zero_level=2"], 20.4e3, 0.962),
    ("qwen3-4b", ["lora=false", "zero_level=1", "shard_weights=true"], 20.5e3, 0.954),
    ("qwen3-4b", ["lora=false", "zero_level=3"], 20.4e3, 0.940),
]
"""Two H200s (benchmarks/evidence/several-gpus.md): model, keys, tokens/s of one GPU, efficiency of two. Ranks did not
exchange rows of the embedding's gradient then."""
FOUR = [
    ("qwen3-0.6b", ["lora=true"], 122.2e3, 0.981),
    ("qwen3-0.6b", ["lora=true", "gradient_accumulation_steps=16"], 121.9e3, 0.995),
    ("qwen3-0.6b", ["lora=true", "recipe=fp8-hybrid"], 138.7e3, 0.987),
    ("qwen3-8b", ["lora=true"], 17.1e3, 0.997),
    ("qwen3-8b", ["lora=true", "recipe=fp8-hybrid"], 25.7e3, 0.985),
    ("qwen3-4b", ["lora=false"], 20.2e3, 0.990),
    ("qwen3-4b", ["lora=false", "gradient_accumulation_steps=1"], 18.6e3, 0.954),
    ("qwen3-4b", ["lora=false", "zero_level=2"], 20.2e3, 0.955),
    ("qwen3-4b", ["lora=false", "zero_level=3"], 20.2e3, 0.931),
    ("qwen3-4b", ["lora=false", "zero_level=3", "gradient_accumulation_steps=1"], 18.6e3, 0.956),
    ("qwen3-4b", ["lora=false", "zero_level=3", "per_device_train_batch_size=4"], 21.4e3, 0.943),
]
"""Four H100s, with which no constant of the model was chosen."""
MEASURED_GATHERS = [(16, 67e-6), (64, 191e-6), (256, 665e-6), (1024, 2.48e-3)]
"""All-gathers of NCCL on four H200s of one machine: MiB in all, seconds (benchmarks/evidence/several-gpus.md)."""


def cluster(nodes: int, per_node: int, wires: str = "nvlink4,8xib400", speed: float | None = None) -> Cluster:
    inside, between = parse(wires, nodes=nodes)
    return Cluster(nodes=nodes, per_node=per_node, inside=inside, between=between, tokens_per_second=speed)


def sent(whole: float, members: int, *, how: Any = "exchange", calls: int = 1, **more: Any) -> Sent:
    """Transfers of `whole` bytes in all."""
    return Sent(what="", nbytes=round(whole * (members - 1) / members), calls=calls, how=how, **more)


def test_an_exchange_sends_to_all_ranks_alike() -> None:
    found = flat(cluster(4, 8), sent(32e9, 32))
    assert found.inside == pytest.approx(7e9), "to the seven others of the node"
    assert found.between == pytest.approx(8 * 24e9), "all eight send to the 24 ranks of other nodes"
    assert found.seconds == pytest.approx(8 * 24e9 / (8 * 46e9) + CALL)


def test_a_gather_is_a_ring_that_enters_each_node_once() -> None:
    found = flat(cluster(4, 8, "nvlink4,4xib400"), sent(32e9, 32, how="gather"))
    assert found.inside == pytest.approx(31e9 * 7 / 8)
    assert found.between == pytest.approx(31e9)
    latency = BASE + 28 * 3.4e-6 + 3 * 14e-6
    assert found.seconds == pytest.approx(31e9 / (4 * 46e9) + latency), "the network is the slower wire"
    thousand = flat(cluster(125, 8), sent(0, 1000, how="gather"))
    assert thousand.seconds == pytest.approx(BASE + 875 * 3.4e-6 + 124 * 14e-6)


def test_two_stages_send_each_byte_out_of_a_node_once() -> None:
    spread = cluster(4, 8)
    exchange, gather = (hierarchical(spread, sent(32e9, 32, how=how)) for how in ("exchange", "gather"))
    assert exchange.inside == gather.inside == pytest.approx(28e9)
    assert exchange.between == gather.between == pytest.approx(24e9)
    assert exchange.seconds == pytest.approx(28e9 / (0.51 * 450e9) + 24e9 / (8 * 46e9) + 2 * CALL)
    latency = CALL + max(CALL, BASE + 3 * 14e-6)
    assert gather.seconds == pytest.approx(28e9 / (0.65 * 450e9) + 24e9 / (8 * 46e9) + latency)
    assert exchange.between < flat(spread, sent(32e9, 32)).between / 7
    alone = hierarchical(cluster(4, 1), sent(32e9, 4))
    assert alone.inside == 0


@pytest.mark.parametrize("model", [flat, hierarchical])
def test_replicas_send_their_parts_between_nodes_only(model: Any) -> None:
    """Shards on each of 4 nodes of 8: a rank has an eighth."""
    shard = model(cluster(4, 8), sent(32e9, 8, how="gather", ranks=8))
    assert (shard.inside, shard.between) == (pytest.approx(28e9), 0)
    replicas = model(cluster(4, 8), sent(4e9, 4, ranks=4, stride=8))
    assert (replicas.inside, replicas.between) == (0, pytest.approx(8 * 3e9))


def test_replicas_of_one_node_add_first() -> None:
    """Shards of 2 on 4 nodes of 8: four replicas on each node."""
    one = sent(16e9, 16, ranks=16, stride=2)
    assert hierarchical(cluster(4, 8), one).inside == pytest.approx(12e9)
    assert hierarchical(cluster(4, 8), one).between == pytest.approx(8 * 4e9 * 3 / 4)
    assert flat(cluster(4, 8), one).between == pytest.approx(8 * 12e9)


def test_a_step_is_what_one_gpu_computes_and_what_is_not_hidden() -> None:
    spread = cluster(2, 1, "nvlink4,8GB/s", speed=1000)
    one = sent(16e9, 2, beside="backward")
    work = GpuWork(tokens=4000, micro_steps=1, update=1.0, shared=0.5)
    found = cost(spread, [one], work)
    assert found.wire is not None
    assert found.alone == 4
    assert found.wire.hidden == pytest.approx(HIDDEN_NCCL * found.wire.seconds)
    assert found.seconds == pytest.approx(4 - 0.5 + found.wire.seconds * (1 - HIDDEN_NCCL) + WAIT)
    assert found.seconds
    assert found.efficiency == pytest.approx(4 / found.seconds)
    near = cost(cluster(1, 2, speed=1000), [one], work)
    assert near.wire is not None
    assert near.wire.hidden == pytest.approx(HIDDEN * near.wire.seconds), "copy engines leave the multiprocessors alone"


def test_the_stage_inside_a_node_is_hidden_as_on_one_machine() -> None:
    both = cluster(2, 4, "nvlink4,8GB/s", speed=1000)
    work = GpuWork(tokens=40_000, micro_steps=1, update=0.0, shared=0.0)
    one = sent(16e9, 8, beside="backward")
    traffic = hierarchical(both, one)
    assert traffic.copied == pytest.approx(hierarchical(cluster(1, 4), sent(16e9, 4)).seconds, rel=1e-3)
    found = cost(both, [one], work, hierarchical)
    assert found.wire is not None
    hidden = HIDDEN * traffic.copied + HIDDEN_NCCL * (traffic.seconds - traffic.copied)
    assert found.wire.hidden == pytest.approx(hidden)
    assert flat(both, one).copied == 0
    shard = sent(16e9, 4, ranks=4)
    assert flat(both, shard).copied == flat(both, shard).seconds, "a group that no machine leaves"


def test_each_transfer_is_hidden_by_what_moves_it() -> None:
    """Sums of replicas have nothing beside them, and change nothing of what copy engines move inside a machine."""
    both = cluster(2, 4, "nvlink4,8GB/s", speed=1000)
    work = GpuWork(tokens=40_000, micro_steps=1, update=0.0, shared=0.0)
    shards, replicas = sent(16e9, 4, ranks=4, beside="both"), sent(8e9, 2, ranks=2, stride=4)
    found = cost(both, [shards, replicas], work, hierarchical)
    assert found.wire is not None
    assert found.wire.hidden == pytest.approx(HIDDEN * hierarchical(both, shards).seconds)
    by_nccl = cost(replace(both, copies=False), [shards, replicas], work, hierarchical)
    assert by_nccl.wire is not None
    assert by_nccl.wire.hidden == pytest.approx(HIDDEN_NCCL * hierarchical(both, shards).seconds)


def test_what_is_not_given_is_not_invented() -> None:
    work = GpuWork(tokens=4000, micro_steps=1, update=0.0, shared=0.0)
    one = sent(16e9, 2, beside="backward")
    no_speed = cost(cluster(2, 1), [one], work)
    assert no_speed.wire is not None
    assert no_speed.wire.seconds > 0
    assert (no_speed.seconds, no_speed.efficiency) == (None, None)
    no_wires: Cost = cost(Cluster(nodes=2, per_node=1, tokens_per_second=1000), [one], work)
    assert no_wires.between == pytest.approx(8e9)
    assert (no_wires.wire, no_wires.seconds) == (None, None)


@pytest.mark.parametrize(("mebibytes", "seconds"), MEASURED_GATHERS)
def test_gathers_of_four_gpus_take_up_to_a_quarter_less_than_the_model_says(mebibytes: int, seconds: float) -> None:
    found = flat(cluster(1, 4), sent(mebibytes * 2**20, 4, how="gather"))
    assert 1 < found.seconds / seconds < 1.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "gpu", "model", "keys", "speed", "share"),
    [(2, "h200", *row) for row in MEASURED] + [(4, "h100", *row) for row in FOUR],
    ids=str,
)
def test_the_model_is_near_what_several_gpus_reach(
    gpus: int,
    gpu: str,
    model: str,
    keys: list[str],
    speed: float,
    share: float,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "ROWS_OF_VOCABULARY", 10**9)
    given = {key.partition("=")[0] for key in keys}
    shared = [key for key in TABLE if key.partition("=")[0] not in given]
    more = ["gradient_accumulation_steps=4"] * all("accumulation" not in key for key in keys)
    more += ["optimizer=adamw_8bit", "master_dtype=bf16"] if "lora=false" in keys else ["optimizer=adamw"]
    words = [f"gpus_per_node={gpus}", "interconnect=nvlink4", f"tokens_per_second={speed}", "--gpu", gpu, "--json"]
    assert main(["plan", f"model={model}", *shared, *keys, *more, *words]) == 0
    near = 0.035 if (gpus, keys) == (4, ["lora=false", "gradient_accumulation_steps=1"]) else 0.02
    assert json.loads(capsys.readouterr().out)["efficiency"] == pytest.approx(share, abs=near)


SMALL = ["model.config.num_hidden_layers=2", "sequence_len=256", "recompute=false", "lmhead_chunks=1", "lora=false"]


@pytest.mark.slow
def test_for_people(capsys: Any) -> None:
    words = [*SMALL, "num_nodes=4", "gpus_per_node=8", "--gpu", "h200"]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert main(["plan", *SMALL, "num_nodes=1", "gpus_per_node=2", "--gpu", "h200"]) == 0
    assert "on 1 node of 2 × H200" in capsys.readouterr().out
    assert "on 4 nodes of 8 × H200" in out
    assert "Speed    not known; add interconnect=nvlink4,8xib400; add tokens_per_second=" in out
    assert "NVLink" not in out
    assert "efficiency" not in out
    assert main(["plan", *words, "interconnect=nvlink4,8xib400", "tokens_per_second=1e4"]) == 0
    out = capsys.readouterr().out
    assert "of the speed of 32 single GPUs (from the given 10,000 tokens/s of one)" in out
    assert "in one stage, with hierarchical_reduction=false" in out
    assert "no run on several machines has been measured" in out
    assert main(["plan", *words, "interconnect=nvlink4,8xib400", "tokens_per_second=1e4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 32
    staged, alike = (found["cluster"][name]["efficiency"] for name in ("hierarchical", "flat"))
    assert 1 > found["efficiency"] == staged > alike > 0
    assert found["cluster"]["stages"] == 2
    assert found["tokens_per_second"] == pytest.approx(32e4 * found["efficiency"])
    keys = ["interconnect=nvlink4,8xib400", "tokens_per_second=1e4", "hierarchical_reduction=false"]
    assert main(["plan", *words, *keys]) == 0
    assert "in two stages, with hierarchical_reduction=true" in capsys.readouterr().out


@pytest.mark.parametrize("context", [1, 2])
def test_gpus_that_share_rows_have_their_part_of_the_tokens(context: int, capsys: Any) -> None:
    """One micro-batch for all GPUs, the fewest that a step can have: speed times time are the tokens of a step."""
    keys = [f"context_parallel_size={context}", "gradient_accumulation_steps=1", "per_device_train_batch_size=1"]
    words = ["gpus_per_node=2", "interconnect=nvlink4", "tokens_per_second=1e4", "--gpu", "h200", "--json"]
    assert main(["plan", *SMALL, *keys, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_step"] == 256 * 2 // context
    assert found["tokens_per_second"] * found["seconds_per_step"] == pytest.approx(found["tokens_per_step"])


def test_mistakes_end_the_command(capsys: Any) -> None:
    assert main(["plan", *SMALL, "num_nodes=4"]) == 2
    assert "Fix: add gpus_per_node=8" in capsys.readouterr().err
    assert main(["plan", *SMALL, "num_nodes=2", "gpus_per_node=2", "device=cpu"]) == 2
    assert "a cluster has GPUs, and none is here. Fix: add --gpu h200" in capsys.readouterr().err
